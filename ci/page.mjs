// Opens report.html in a headless Chromium and uses it: no console error, filters by mouse, keyboard and address, print,
// dark and light, and a run of 50,000 records within two seconds. Needs Node 22 (20 with --experimental-websocket) and chromium-headless-shell (or CHROMIUM).
//
//     node ci/page.mjs SAMEBITS RUN [SCREENSHOT.png]
import { spawn, spawnSync } from "node:child_process";
import { cpSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";

const [samebits, run, screenshot] = process.argv.slice(2);
if (!run) throw new Error("usage: node ci/page.mjs SAMEBITS RUN [SCREENSHOT.png]");
const folder = mkdtempSync(join(tmpdir(), "samebits-page-"));
const chromium = process.env.CHROMIUM || "chromium-headless-shell";
const check = (holds, what) => {
  if (!holds) throw new Error(what);
  console.log(`ok   ${what}`);
};

// A run with as many records: those of RUN over and over, each with a name of its own.
const enlarge = (count) => {
  const large = join(folder, "large");
  cpSync(run, large, { recursive: true });
  const lines = readFileSync(join(run, "records.jsonl"), "utf8").trimEnd().split("\n");
  const out = [];
  for (let i = 0; i < count; i++) {
    const record = JSON.parse(lines[i % lines.length]);
    record.case += `#${Math.floor(i / lines.length)}`;
    out.push(JSON.stringify(record));
  }
  writeFileSync(join(large, "records.jsonl"), out.join("\n") + "\n");
  const facts = JSON.parse(readFileSync(join(large, "run.json"), "utf8"));
  delete facts.sealed;
  facts.planned = count;
  writeFileSync(join(large, "run.json"), JSON.stringify(facts));
  const rendered = spawnSync(samebits, ["report", large]);
  if (rendered.status > 1) throw new Error(`samebits report: ${rendered.stderr}`);
  return join(large, "report.html");
};

const browser = spawn(chromium, ["--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", `--user-data-dir=${folder}/profile`, "about:blank"],
  { stdio: ["ignore", "ignore", "pipe"], detached: true });
const address = await new Promise((found, failed) => {
  let said = "";
  browser.stderr.on("data", (part) => {
    said += part;
    const match = said.match(/DevTools listening on (ws:\S+)/);
    if (match) found(match[1]);
  });
  browser.on("error", failed);
  browser.on("exit", () => failed(new Error(`${chromium} ended: ${said}`)));
});
try {
  const host = new URL(address).host;
  const page = (await (await fetch(`http://${host}/json/list`)).json()).find((target) => target.type === "page");
  const socket = new WebSocket(page.webSocketDebuggerUrl);
  await new Promise((open) => socket.addEventListener("open", open));
  const waiting = new Map(), errors = [];
  let number = 0, loaded = () => {};
  socket.addEventListener("message", ({ data }) => {
    const message = JSON.parse(data);
    if (message.id) {
      const { resolve: done, reject } = waiting.get(message.id);
      waiting.delete(message.id);
      message.error ? reject(new Error(message.error.message)) : done(message.result);
    }
    if (message.method === "Runtime.exceptionThrown") errors.push(message.params.exceptionDetails.text);
    if (message.method === "Log.entryAdded" && message.params.entry.level === "error") errors.push(message.params.entry.text);
    if (message.method === "Page.loadEventFired") loaded();
  });
  const send = (method, params = {}) => new Promise((resolve, reject) => {
    waiting.set(++number, { resolve, reject });
    socket.send(JSON.stringify({ id: number, method, params }));
  });
  const value = async (expression) => {
    const { result, exceptionDetails } = await send("Runtime.evaluate", { expression, awaitPromise: true, returnByValue: true });
    if (exceptionDetails) throw new Error(`${expression}: ${exceptionDetails.exception?.description}`);
    return result.value;
  };
  const open = async (path) => {
    const done = new Promise((event) => { loaded = event; });
    const start = performance.now();
    await send("Page.navigate", { url: `file://${resolve(path)}` });
    await done;
    // Until the list is drawn and painted.
    await value("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))");
    return (performance.now() - start) / 1000;
  };
  const key = async (key, code, text) => {
    const event = { key, code: key, windowsVirtualKeyCode: code, text };
    await send("Input.dispatchKeyEvent", { type: "keyDown", ...event });
    await send("Input.dispatchKeyEvent", { type: "keyUp", ...event });
  };
  await Promise.all(["Page.enable", "Runtime.enable", "Log.enable"].map((method) => send(method)));
  await send("Emulation.setDeviceMetricsOverride", { width: 1280, height: 1600, deviceScaleFactor: 1, mobile: false });

  const rendered = spawnSync(samebits, ["report", run]);
  if (rendered.status > 1) throw new Error(`samebits report: ${rendered.stderr}`);
  const report = join(run, "report.html");
  await open(report);
  const records = readFileSync(join(run, "records.jsonl"), "utf8").trimEnd().split("\n").map((line) => JSON.parse(line));
  const shown = () => value("document.getElementById('shown').textContent");
  const count = async () => Number((await shown()).split(" ")[0].replaceAll(",", ""));
  check(await count() === records.length, `all ${records.length} records are listed`);
  check(await value("document.querySelectorAll('#list li').length") > 0, "the list is drawn");

  // Filters by their fields.
  const op = records[0].op;
  await value(`{ const form = document.getElementById('filters'); form.elements.op.value = ${JSON.stringify(op)}; form.dispatchEvent(new Event('input', { bubbles: true })); }`);
  check(await count() === records.filter((r) => r.op === op).length, `the filter on op ${op} holds`);
  await value("document.querySelector('#filters button[type=reset]').click()");
  await value("new Promise((done) => setTimeout(done, 50))");
  check(await count() === records.length, "the filters are cleared");
  await value(`{ const form = document.getElementById('filters'); form.elements.text.value = ${JSON.stringify(records[0].case)}; form.dispatchEvent(new Event('input', { bubbles: true })); }`);
  check(await count() === records.filter((r) => r.case.includes(records[0].case)).length, "the text filter holds");
  await value("document.querySelector('#filters button[type=reset]').click()");
  await value("new Promise((done) => setTimeout(done, 50))");

  // The matrix: by mouse, and by keyboard alone.
  await value("document.querySelector('.matrix button').click()");
  check(await count() < records.length && (await count()) > 0, "a cell of the matrix filters");
  await value("document.querySelector('.matrix button').focus()");
  const focused = () => value("document.activeElement.getAttribute('aria-label')");
  const before = await focused();
  await key("ArrowRight", 39);
  check(await focused() !== before, "an arrow key walks the matrix");
  await key("Enter", 13, "\r");
  check(await value("document.activeElement.getAttribute('aria-pressed')") === "true", "Enter presses a cell");
  check((await value("location.hash")).includes("judgment="), "the address keeps the filters");

  // Drill-down to the bits, by keyboard.
  await value("{ location.hash = ''; }");
  await value("new Promise((done) => setTimeout(done, 100))");
  await value("document.querySelector('#list button').focus()");
  await key("Enter", 13, "\r");
  check(await value("document.querySelector('#list button').getAttribute('aria-expanded')") === "true", "Enter opens a record");
  // What is compared with the f64 truth has no bits to compare.
  const failed = records.find((r) => r.evidence?.expected_bits);
  if (failed) {
    await value(`{ location.hash = 'verdict=fail&judgment=${failed.judgment}'; }`);
    await value("new Promise((done) => setTimeout(done, 100))");
    await value("document.querySelector('#list button').click()");
    check(await value("document.querySelectorAll('#list .bits mark').length") > 0, "the bits that differ are marked");
  }
  check(await value("document.querySelectorAll('#errors .heat td[class*=heat]').length") > 0 || !records.some((r) => r.measure), "the heat map has cells");

  // Dark and light differ, print opens, nothing scrolls sideways.
  const paper = () => value("getComputedStyle(document.body).backgroundColor");
  const scheme = (value) => send("Emulation.setEmulatedMedia", { features: [{ name: "prefers-color-scheme", value }] });
  await scheme("light");
  const light = await paper();
  await scheme("dark");
  check(await paper() !== light, "dark is not light");
  await scheme("light");
  check(await value("document.documentElement.scrollWidth <= innerWidth"), "nothing scrolls sideways at 1280 pixels");
  const { data: pdf } = await send("Page.printToPDF");
  check(pdf.length > 10_000, "it prints");
  if (screenshot) {
    const { data } = await send("Page.captureScreenshot");
    writeFileSync(screenshot, Buffer.from(data, "base64"));
    check(data.length > 10_000, `a screenshot is in ${screenshot}`);
  }

  const large = enlarge(50_000);
  const seconds = await open(large);
  check(await count() === 50_000, "all 50,000 records of a large run are listed");
  check(seconds < 2, `a run of 50,000 records opens in ${seconds.toFixed(2)} s`);
  check(errors.length === 0, `no error on the console ${errors.join("; ")}`);
} finally {
  // With all that it started.
  try {
    process.kill(-browser.pid, "SIGKILL");
  } catch {
    // It has ended by itself.
  }
  await new Promise((done) => browser.exitCode === null && browser.signalCode === null ? browser.on("exit", done) : done());
  rmSync(folder, { recursive: true, force: true, maxRetries: 5 });
}
console.log("the page holds");
