//! A second profile, which nothing implements: its name goes from a table of the contract into names of cases, keys of goldens,
//! requests and vectors, and whoever is asked for its bits refuses it by name. A program of its own, as what is registered
//! stays so.

use samebits_contract::axis::Machine;
use samebits_contract::case::{Answer, Case, Status};
use samebits_contract::record::{Judgment, Record};
use samebits_contract::spec;
use samebits_contract::table::{CaseSpec, Contract, Slice};
use samebits_contract::verdict::Verdict;
use samebits_contract::wire::{decode_request, encode_request};
use samebits_goldens::{Provenance, Store, Verified};
use samebits_harness::checkpoints::Checkpoints;
use samebits_harness::implementation::Implementation;
use samebits_harness::implementation::cpu::CpuImplementation;
use samebits_harness::judge::{Judge, Selection, plan};
use samebits_judge::probe;
use samebits_ops::{Attributes, Backend, Cpu, TensorMut, TensorRef};
use samebits_schema::{IEEE, PROFILES, profiles, register_profile};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Once;

/// The profile that nothing implements.
const DUMMY: &str = "dummy";

fn registered() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        assert_eq!((PROFILES, profiles()), (&[IEEE][..], vec![IEEE]));
        register_profile(DUMMY).unwrap();
        assert_eq!(profiles(), [IEEE, DUMMY]);
    });
    let again = register_profile(DUMMY).unwrap_err().to_string();
    assert!(again.contains("another one has this name") && register_profile(IEEE).is_err(), "{again}");
    assert!(register_profile("a-b").is_err() && register_profile("").is_err());
}

/// The contract with its cases of `scale` called `small` once more, in the other profile.
fn contract() -> Contract {
    registered();
    let mut tables = Contract::tables();
    let scale = tables.get_mut("ops/scale.toml").expect("scale has a table");
    let (head, case) = (scale.find("[[case]]").unwrap(), scale.split("[[case]]").nth(1).unwrap());
    let params = "params = { ";
    assert!(case.contains(params), "{case}");
    let case = case.replace(params, "params = { profile = \"dummy\", ");
    scale.insert_str(head, &format!("[[case]]{case}\n"));
    Contract::of_tables(&tables).unwrap()
}

/// The case of both profiles.
fn both(contract: &Contract) -> [&CaseSpec; 2] {
    let name = "scale/bf16/small-normal-fp32";
    [contract.case(name).unwrap(), contract.case(&format!("{name}@dummy")).unwrap()]
}

fn cpu() -> CpuImplementation {
    CpuImplementation::new(Cpu::best())
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

#[test]
fn a_name_is_of_one_profile() {
    let contract = contract();
    let [usual, other] = both(&contract);
    assert_eq!((usual.profile(), other.profile()), (IEEE, DUMMY));
    assert_ne!(usual.group, other.group, "cases of a group have the same parameters");
    let (asked, case) = (usual.build(), other.build());
    let bytes = |case: &Case| case.inputs.iter().map(|(name, x)| (name.clone(), x.to_bytes())).collect::<Vec<_>>();
    assert!(bytes(&asked) == bytes(&case) && asked.inputs.len() == 1, "both are asked the same");
    assert_eq!(case.params["profile"], DUMMY);
    // Without a name of its own a case has that of its contract.
    let mut tables = Contract::tables();
    let main = tables.get_mut("ws1.toml").unwrap();
    *main = main.replace("profile = \"ieee\"", "profile = \"dummy\"");
    let whole = Contract::of_tables(&tables).unwrap();
    assert_eq!(whole.profile, DUMMY);
    for case in whole.cases(Slice::Exhaustive) {
        assert!(case.name.ends_with("@dummy") && case.profile() == DUMMY, "{}", case.name);
    }
    let unknown = Contract::of_tables(&BTreeMap::from_iter(
        tables.into_iter().map(|(path, text)| (path, text.replace("profile = \"dummy\"", "profile = \"nothing\""))),
    ));
    let unknown = unknown.unwrap_err().to_string();
    assert!(unknown.contains("profile `nothing` is not known") && unknown.contains("\"dummy\""), "{unknown}");
}

#[test]
fn goldens_are_kept_by_profile() {
    let contract = contract();
    let [usual, other] = both(&contract);
    let answer = cpu().run(&usual.build());
    let folder = tempfile::tempdir().unwrap();
    let mut store = Store::create(folder.path()).unwrap();
    let provenance = Provenance {
        contract: contract.digest().to_string(),
        toolchain: "a test".into(),
        date: "2026-11-28".into(),
        reason: "a test".into(),
    };
    let mut bless = |case: &CaseSpec, hashes: bool| {
        let answers = BTreeMap::from([(case.name.clone(), answer.outputs.clone())]);
        match hashes {
            false => store.bless(&answers, &BTreeSet::new(), &provenance),
            true => store.bless_hashes(&answers, &BTreeSet::new(), &provenance),
        }
        .unwrap();
        Store::open(folder.path()).unwrap()
    };
    for hashes in [false, true] {
        let one = bless(usual, hashes);
        assert!(matches!(one.verify(&usual.name, &answer.outputs), Verified::Match));
        assert!(hashes || matches!(one.verify(&other.name, &answer.outputs), Verified::Absent), "of the other profile");
        let two = bless(other, hashes);
        assert!(matches!(two.verify(&other.name, &answer.outputs), Verified::Match));
        assert_eq!(two.entries().count(), 2);
    }
}

/// What refuses, and how.
fn refuses(answer: &Answer) {
    assert_eq!(answer.status, Status::Unsupported, "{}", answer.reason);
    assert!(answer.reason.contains("profile `dummy` is not offered here; use ieee"), "{}", answer.reason);
}

#[test]
fn who_does_not_have_it_refuses_it_by_name() {
    let contract = contract();
    let [usual, other] = both(&contract);
    let (asked, case) = (usual.build(), other.build());
    assert_eq!(cpu().run(&asked).status, Status::Ok);
    refuses(&cpu().run(&case));
    // Over the wire as well.
    let sent = decode_request(&encode_request(&case)).unwrap();
    assert_eq!(sent.params, case.params);
    refuses(&cpu().run(&sent));

    // By name, of every op that is called so, and again through what keeps calls.
    let (x, mut y) = ([1f32], [7f32]);
    for (profile, refused) in [(IEEE, false), (DUMMY, true), ("nothing", true)] {
        let attributes = Attributes::new().with("profile", profile);
        let inputs = [("x", TensorRef::new(&x, &[1]).unwrap())];
        let output = vec![("y", TensorMut::new(&mut y, &[1]).unwrap())];
        let called = Cpu::best().call("scale", attributes.clone(), &inputs, output);
        assert_eq!(called.is_err(), refused, "{profile}");
        let mut calls = samebits_ops::Calls::default();
        for _ in 0..2 {
            let output = vec![("y", TensorMut::new(&mut y, &[1]).unwrap())];
            let called = calls.run(&Cpu::best(), "scale", &attributes, &inputs, output);
            assert_eq!(called.is_err(), refused, "{profile}");
            assert!(!refused || called.unwrap_err().to_string().contains(&format!("`{profile}` is not offered")));
        }
    }

    // Whole models as well.
    let checkpoints = Checkpoints::new(Some(repository().join("tests/checkpoints")));
    let chain = contract.cases(Slice::Quick).find(|case| case.op == "chain").unwrap();
    let mut case = checkpoints.recordings().fill(chain, 0).unwrap();
    case.params.insert("profile".into(), DUMMY.into());
    refuses(&checkpoints.answer(&Cpu::best(), &case));
}

/// Its records say so, and nothing is compared with what the other profile declares or has blessed.
#[test]
fn a_run_says_that_it_is_not_offered() {
    let contract = contract();
    let store = Store::open(&repository().join("goldens")).unwrap();
    let checkpoints = Checkpoints::new(None);
    let judged = |implementation: &dyn Implementation| -> Vec<Record> {
        let judge = Judge {
            contract: &contract,
            rows: contract.default_rows(),
            implementation,
            goldens: Some(&store),
            references: Vec::new(),
            recordings: checkpoints.recordings(),
            machine: &Machine::default(),
        };
        let selection = Selection { cases: vec!["scale/bf16/small-*".into()], ..Selection::all(Slice::Quick) };
        let plan = plan(&contract, implementation.name(), &selection);
        plan.iter().flat_map(|group| judge.group(group)).filter(|record| record.case.contains("@dummy")).collect()
    };
    let records = judged(&cpu());
    assert!(records.len() > 9);
    for record in &records {
        let (Verdict::Unsupported { reason } | Verdict::Untested { reason }) = &record.verdict else {
            panic!("{}: {:?}", record.case, record.verdict)
        };
        assert!(reason.contains("profile `dummy` is not offered here"), "{reason}");
    }

    // Who answers, whatever the profile is called, is held to goldens and answers of that profile alone; there are none.
    struct Careless(CpuImplementation);
    impl Implementation for Careless {
        fn name(&self) -> &str {
            self.0.name()
        }
        fn version(&self) -> &str {
            self.0.version()
        }
        fn run(&self, case: &Case) -> Answer {
            let mut case = case.clone();
            case.params.remove("profile");
            self.0.run(&case)
        }
    }
    for record in judged(&Careless(cpu())) {
        let said = format!("{}: {:?}", record.case, record.verdict);
        match record.judgment {
            Judgment::Golden => assert!(said.contains("not among the goldens"), "{said}"),
            Judgment::Arithmetic => assert!(said.contains("no answers are declared for the profile `dummy`"), "{said}"),
            _ => {}
        }
    }
    let gemm = probe::Op::find("gemm").unwrap();
    assert!(gemm.declared(IEEE, 5).is_some() && gemm.declared(DUMMY, 5).is_none());
}

/// A vector is one profile's.
#[test]
fn a_vector_of_another_profile_is_refused() {
    registered();
    let mut tables = Contract::tables();
    let main = tables.get_mut("ws1.toml").unwrap();
    *main = main.replace("profile = \"ieee\"", "profile = \"dummy\"");
    let contract = Contract::of_tables(&tables).unwrap();
    let vector = contract.cases(Slice::Exhaustive).find(|case| case.vector.is_some()).unwrap();
    let recordings = Checkpoints::new(None).recordings().clone();
    for error in [
        recordings.fill(vector, 0).unwrap_err(),
        recordings.expected(vector, vector.vector.as_ref().unwrap()).unwrap_err(),
    ] {
        assert!(error.contains("its profile is ieee") && error.contains("one of dummy"), "{error}");
    }
    assert!(spec::find(&vector.op).is_some());
}
