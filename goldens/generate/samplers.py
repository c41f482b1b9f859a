"""Records what samplers of diffusers make of a small closed model: models/tests/samplers.json.

    python goldens/generate/samplers.py

needs torch and diffusers. The model is a few sums, so that the test computes the same: of the latents x as the sampler scales
them and the timestep t, `0.6 x + 0.3 x[one before] + 0.0001 t - 0.05`.
"""

import json
import pathlib

import diffusers
import torch
from diffusers import schedulers

LATENTS = 8
SD = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012, "num_train_timesteps": 1000}
CASES = {
    "ddim": ("DDIMScheduler", {**SD, "clip_sample": False, "set_alpha_to_one": False, "steps_offset": 1}, 30),
    "ddim_clipped": ("DDIMScheduler", {"beta_schedule": "linear"}, 20),
    "ddim_velocity": ("DDIMScheduler", {**SD, "prediction_type": "v_prediction", "timestep_spacing": "trailing",
                                        "clip_sample": False}, 30),
    "ddim_sample": ("DDIMScheduler", {**SD, "prediction_type": "sample", "timestep_spacing": "linspace"}, 7),
    "pndm": ("PNDMScheduler", {**SD, "skip_prk_steps": True, "steps_offset": 1}, 30),
    "pndm_velocity": ("PNDMScheduler", {**SD, "skip_prk_steps": True, "prediction_type": "v_prediction", "set_alpha_to_one": True,
                                        "timestep_spacing": "trailing"}, 7),
    "pndm_two": ("PNDMScheduler", {**SD, "skip_prk_steps": True, "timestep_spacing": "linspace"}, 2),
    "euler": ("EulerDiscreteScheduler", {**SD, "timestep_spacing": "leading", "steps_offset": 1}, 30),
    "euler_linspace": ("EulerDiscreteScheduler", SD, 30),
    "euler_velocity": ("EulerDiscreteScheduler", {**SD, "prediction_type": "v_prediction", "timestep_spacing": "trailing"}, 30),
    "euler_karras": ("EulerDiscreteScheduler", {**SD, "use_karras_sigmas": True}, 30),
    "euler_cosine": ("EulerDiscreteScheduler", {"beta_schedule": "squaredcos_cap_v2", "final_sigmas_type": "sigma_min"}, 12),
    "euler_ancestral": ("EulerAncestralDiscreteScheduler", SD, 30),
    "euler_ancestral_velocity": ("EulerAncestralDiscreteScheduler", {**SD, "prediction_type": "v_prediction",
                                                                     "timestep_spacing": "leading"}, 30),
    "heun": ("HeunDiscreteScheduler", SD, 30),
    "heun_karras": ("HeunDiscreteScheduler", {**SD, "use_karras_sigmas": True, "timestep_spacing": "trailing"}, 9),
    "dpmpp_2m": ("DPMSolverMultistepScheduler", SD, 30),
    "dpmpp_2m_karras": ("DPMSolverMultistepScheduler", {**SD, "use_karras_sigmas": True}, 30),
    "dpmpp_2m_few": ("DPMSolverMultistepScheduler", {**SD, "timestep_spacing": "leading", "steps_offset": 1,
                                                     "final_sigmas_type": "sigma_min"}, 10),
    "dpmpp_2m_heun": ("DPMSolverMultistepScheduler", {**SD, "solver_type": "heun", "prediction_type": "v_prediction",
                                                      "timestep_spacing": "trailing"}, 30),
    "dpmpp_2m_sde": ("DPMSolverMultistepScheduler", {**SD, "algorithm_type": "sde-dpmsolver++"}, 30),
    "dpmpp_2m_sde_karras": ("DPMSolverMultistepScheduler", {**SD, "algorithm_type": "sde-dpmsolver++", "solver_type": "heun",
                                                            "use_karras_sigmas": True}, 30),
    "dpmpp_1": ("DPMSolverMultistepScheduler", {**SD, "solver_order": 1}, 12),
    "unipc": ("UniPCMultistepScheduler", SD, 30),
    "unipc_3": ("UniPCMultistepScheduler", {**SD, "solver_order": 3, "timestep_spacing": "trailing"}, 30),
    "unipc_bh1_karras": ("UniPCMultistepScheduler", {**SD, "solver_type": "bh1", "use_karras_sigmas": True,
                                                     "final_sigmas_type": "sigma_min"}, 12),
    "unipc_flow": ("UniPCMultistepScheduler", {"prediction_type": "flow_prediction", "use_flow_sigmas": True,
                                               "flow_shift": 3.0}, 30),
    "lcm": ("LCMScheduler", {"original_inference_steps": 50}, 8),
    "lcm_velocity": ("LCMScheduler", {"prediction_type": "v_prediction", "clip_sample": True, "clip_sample_range": 2.0}, 4),
    "flow_euler": ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}, 28),
    "flow_euler_plain": ("FlowMatchEulerDiscreteScheduler", {}, 30),
    "flow_euler_dynamic": ("FlowMatchEulerDiscreteScheduler", {"use_dynamic_shifting": True, "shift": 3.0}, 30),
    "flow_euler_terminal": ("FlowMatchEulerDiscreteScheduler", {"shift": 2.0, "shift_terminal": 0.1}, 10),
    "flow_euler_stochastic": ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0, "stochastic_sampling": True}, 30),
}
MU = 0.8


def model(x, t):
    return 0.6 * x + 0.3 * x.roll(1, -1) + float(t) * 0.0001 - 0.05


def record(name, kind, config, steps):
    generator = torch.Generator().manual_seed(len(name))
    scheduler = getattr(schedulers, kind)(**config)
    dynamic = bool(config.get("use_dynamic_shifting"))
    scheduler.set_timesteps(steps, **({"mu": MU} if dynamic else {}))
    drawn = []

    def draw(shape, **_):
        drawn.append(torch.randn(shape, generator=generator))
        return drawn[-1]

    module = __import__(type(scheduler).__module__, fromlist=["randn_tensor"])
    if hasattr(module, "randn_tensor"):
        module.randn_tensor = draw
    noise = torch.randn(1, 1, 1, LATENTS, generator=generator)
    scale = float(getattr(scheduler, "init_noise_sigma", 1.0))
    x, latents, timesteps = noise * scale, [], []
    for t in scheduler.timesteps:
        x_in = scheduler.scale_model_input(x, t) if hasattr(scheduler, "scale_model_input") else x
        x = scheduler.step(model(x_in, t), t, x, return_dict=False)[0]
        timesteps.append(float(t))
        latents.append(x.flatten().tolist())
    # As a folder has it, with all that is not a default of this version.
    saved = {key: value for key, value in scheduler.config.items() if key not in ("_use_default_values",)}
    saved = {"_class_name": kind, **{k: None if isinstance(v, float) and v == float("-inf") else v for k, v in saved.items()}}
    return {
        "name": name, "config": saved, "steps": steps, "mu": MU if dynamic else None, "noise": noise.flatten().tolist(),
        "scale": scale, "drawn": [d.flatten().tolist() for d in drawn], "timesteps": timesteps, "latents": latents,
    }


def main():
    torch.set_grad_enabled(False)
    out = pathlib.Path(__file__).resolve().parents[2] / "models/tests/samplers.json"
    cases = [record(name, *case) for name, case in CASES.items()]
    lines = ",\n".join(json.dumps(case) for case in cases)
    out.write_text(f'{{"diffusers": "{diffusers.__version__}", "torch": "{torch.__version__}", "cases": [\n{lines}\n]}}\n')
    print(out, out.stat().st_size)


if __name__ == "__main__":
    main()
