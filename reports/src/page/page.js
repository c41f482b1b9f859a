
"use strict";
(() => {
  const PAGE = 100;
  const data = JSON.parse(document.getElementById("data").textContent);
  const C = Object.fromEntries(data.columns.map((name, i) => [name, i]));
  const text = (record, column) => record[C[column]] === null ? null : data.strings[record[C[column]]];
  // Worst first, then by count of what a reader has to do about it.
  const VERDICTS = {
    fail: ["✗", "fail", "red"], error: ["✗", "error", "red"], untested: ["✗", "untested", "red"],
    stale_waiver: ["✗", "stale waiver", "red"], waived: ["≈", "waived", "amber"],
    unsupported: ["–", "unsupported", "grey"], pass: ["✓", "pass", "green"],
  };
  const ORDER = Object.keys(VERDICTS);
  const isRed = (record) => VERDICTS[text(record, "verdict")][2] === "red";
  const rank = new Map(data.strings.map((string, i) => [i, ORDER.indexOf(string)]));
  const verdict = C.verdict;
  const records = data.records.map((record, i) => [record, i])
    .sort(([a, i], [b, j]) => rank.get(a[verdict]) - rank.get(b[verdict]) || i - j)
    .map(([record]) => record);

  const element = (name, attributes = {}, ...children) => {
    const node = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  };
  const finite = (value, digits = 6) => value === null ? "not finite" : String(Number(value.toPrecision(digits)));

  // Filters. An axis is written "=name", and "none" stands for a record without one.
  const form = document.getElementById("filters");
  const FIELDS = ["implementation", "op", "dtype", "judgment", "axis", "verdict"];
  const value = (record, field) => field === "axis"
    ? (record[C.axis] === null ? "none" : "=" + text(record, "axis"))
    : text(record, field);
  const options = (field, pairs) => form.elements[field].replaceChildren(
    element("option", { value: "" }, "any"),
    ...pairs.map(([value, label]) => element("option", { value }, label)));
  for (const field of FIELDS) {
    const counts = new Map();
    for (const record of records) {
      const key = value(record, field);
      counts.set(key, (counts.get(key) || 0) + 1);
    }
    let keys = [...counts.keys()].sort();
    if (field === "judgment") keys = data.judgments.filter((name) => counts.has(name));
    if (field === "verdict") keys = ORDER.filter((name) => counts.has(name));
    const label = (key) => (field === "axis" ? (key === "none" ? "(no axis)" : key.slice(1))
      : field === "verdict" ? VERDICTS[key][1] : key) + ` (${counts.get(key).toLocaleString("en")})`;
    const pairs = keys.map((key) => [key, label(key)]);
    if (field === "verdict") {
      const red = records.filter(isRed).length;
      if (red) pairs.unshift(["red", `any red (${red.toLocaleString("en")})`]);
    }
    options(field, pairs);
  }
  if (form.elements.implementation.length <= 2) form.querySelector("[data-field=implementation]").hidden = true;

  const why = (record) => {
    const detail = record[C.detail];
    if (detail === null) return "";
    return typeof detail === "number" ? data.strings[detail] : detail.message;
  };
  const haystacks = new Map();
  const haystack = (record) => {
    let found = haystacks.get(record);
    if (found === undefined) {
      found = [text(record, "case"), text(record, "axis") + "=" + text(record, "setting"), text(record, "kernel"),
        text(record, "class"), why(record)].join("\n").toLowerCase();
      haystacks.set(record, found);
    }
    return found;
  };

  // The list, a page at a time.
  const list = document.getElementById("list");
  const pages = document.getElementById("pages");
  let shown = records, page = 0;

  const draw = () => {
    const last = Math.max(0, Math.ceil(shown.length / PAGE) - 1);
    page = Math.min(page, last);
    list.replaceChildren(...shown.slice(page * PAGE, (page + 1) * PAGE).map(item));
    pages.hidden = last === 0;
    document.getElementById("page").textContent = `page ${page + 1} of ${last + 1}`;
    document.getElementById("previous").disabled = page === 0;
    document.getElementById("next").disabled = page === last;
    document.getElementById("shown").textContent =
      `${shown.length.toLocaleString("en")} of ${records.length.toLocaleString("en")} records` +
      (shown.length > 1 ? ", worst first" : "");
  };

  const chip = (record) => {
    const [glyph, name, colour] = VERDICTS[text(record, "verdict")];
    return element("span", { class: "chip " + colour }, `${glyph} ${name}`);
  };
  const judged = (record) => {
    let words = text(record, "judgment");
    if (record[C.axis] !== null) words += " " + text(record, "axis");
    if (record[C.setting] !== null) words += "=" + text(record, "setting");
    return words;
  };
  const dtypes = (record) => `${text(record, "dtype")} → ${text(record, "out")}`;
  const item = (record) => {
    const button = element("button", { type: "button", "aria-expanded": "false" }, chip(record),
      element("span", { class: "case mono" }, text(record, "case"), " ", element("small", {}, dtypes(record))),
      element("span", {}, judged(record)),
      element("span", { class: "why" }, why(record)));
    const row = element("li", {}, button);
    button.addEventListener("click", () => {
      const open = button.getAttribute("aria-expanded") === "true";
      button.setAttribute("aria-expanded", String(!open));
      if (open) row.lastChild.remove(); else row.append(detail(record));
    });
    return row;
  };

  const facts = (pairs) => element("dl", { class: "facts" }, ...pairs.filter(([, value]) => value !== null && value !== "")
    .map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", { class: "mono" }, value))));
  const detail = (record) => {
    const box = element("div", { class: "record" });
    const found = record[C.detail];
    if (found !== null && typeof found === "object") box.append(...evidence(record, found));
    else if (found !== null) box.append(element("p", {}, data.strings[found]));
    if (record[C.again] !== null) {
      box.append(element("h3", {}, "Run it again"), element("p", { class: "mono" }, record[C.again]));
    }
    const measure = record[C.measure];
    if (measure) {
      const [samples, max, p99, rounded, abs, bound] = measure;
      box.append(element("h3", {}, "Measured against the f64 oracle"), facts([
        ["samples", samples.toLocaleString("en")], ["max ulp", finite(max)], ["p99 ulp", finite(p99)],
        ["correctly rounded (share)", finite(rounded, 9)], ["max |error|", finite(abs)],
        ["largest error / bound", finite(bound)]]));
    }
    const chain = record[C.chain];
    if (chain) {
      const [samples, rms, max, largest, tokens, dlogp, kl, clip] = chain;
      box.append(element("h3", {}, "Logits against the recorded fp32 run"), facts([
        ["logits", samples.toLocaleString("en")], ["rms error", finite(rms)], ["max |error|", finite(max)],
        ["largest |logit|", finite(largest)], ["next tokens", tokens.toLocaleString("en")],
        ["max |Δ log-probability|", finite(dlogp)], ["approx KL", finite(kl)], ["clip fraction", finite(clip)]]));
    }
    const gradient = record[C.gradient];
    if (gradient) {
      const [parameters, batches, length, recorded, dlogp, loss] = gradient;
      box.append(element("h3", {}, "Gradients against those of torch"), facts([
        ["parameters", parameters.toLocaleString("en")], ["batches", batches.toLocaleString("en")],
        ["largest error / length", finite(length)], ["largest error / that of torch's bf16", finite(recorded)],
        ["max |Δ log-probability|", finite(dlogp)], ["largest error of a loss", finite(loss)]]));
    }
    box.append(element("h3", {}, "Record"), facts([
      ["case", text(record, "case")], ["implementation", text(record, "implementation")], ["op", text(record, "op")],
      ["class", text(record, "class")], ["in → out", dtypes(record)],
      ["judgment", judged(record)], ["kernel", text(record, "kernel")], ["seconds", finite(record[C.seconds], 4)]]));
    return box;
  };

  const evidence = (record, e) => {
    const parse = (bits) => /^0x[0-9a-f]+$/i.test(bits) ? [...bits.slice(2)].map((digit) =>
      parseInt(digit, 16).toString(2).padStart(4, "0")).join("") : null;
    const expected = parse(e.expected_bits), found = parse(e.found_bits);
    const reference = text(record, "judgment") === "invariance" ? "base" : "expected";
    const row = (name, value, hex, bits, other) => element("tr", {}, element("th", { scope: "row" }, name),
      element("td", { class: "mono" }, value), element("td", { class: "mono" }, hex || "–"),
      element("td", { class: "bits" }, ...(bits ? pattern(bits, other, fields(record, e, bits.length)) : [])));
    // Evidence on a whole tensor has no element, and so no bits.
    if (!e.found_bits) {
      return [element("p", {}, e.message), facts([["output", e.output], [reference, e.expected], ["found", e.found]])];
    }
    const where = `${e.output}[${e.coordinates.join(", ")}] (index ${e.index.toLocaleString("en")})`;
    const ulp = e.ulp === null ? "" : `, ${finite(e.ulp)} ulp`;
    return [element("p", {}, e.message),
      element("p", {}, `Element ${where}${ulp}. ${e.count.toLocaleString("en")} of ` +
        `${e.total.toLocaleString("en")} elements wrong.`),
      element("div", { class: "scroll" }, element("table", {}, element("thead", {}, element("tr", {},
        ...["", "value", "bits", "binary"].map((name) => element("th", { scope: "col" }, name)))),
      element("tbody", {}, row(reference, e.expected, e.expected_bits, expected, found),
        row("found", e.found, e.found_bits, found, expected))))];
  };
  // Widths of sign, exponent and fraction where the bits are those of the floating-point output, else nibbles.
  const FORMATS = { bf16: [1, 8, 7], fp16: [1, 5, 10], fp32: [1, 8, 23] };
  const fields = (record, e, width) => {
    const format = FORMATS[text(record, "out")] || [];
    const integer = e.found !== "0" && /^-?\d+$/.test(e.found) && (parseInt(e.found_bits, 16) | 0) === Number(e.found);
    if (!integer && format.reduce((a, b) => a + b, 0) === width) return format;
    return Array(width / 4).fill(4);
  };
  const pattern = (bits, other, widths) => {
    let at = 0;
    return widths.map((width) => {
      const group = element("span");
      for (const end = at + width; at < end; at++) {
        const differs = other !== null && other.length === bits.length && other[at] !== bits[at];
        group.append(differs ? element("mark", {}, bits[at]) : bits[at]);
      }
      return group;
    });
  };

  // One way in: the form's values decide what is shown, and the address keeps them.
  const apply = () => {
    const wanted = FIELDS.map((field) => [field, form.elements[field].value]).filter(([, value]) => value);
    const words = form.elements.text.value.toLowerCase().split(/\s+/).filter(Boolean);
    shown = records.filter((record) => wanted.every(([field, want]) =>
      field === "verdict" && want === "red" ? isRed(record) : value(record, field) === want)
      && words.every((word) => haystack(record).includes(word)));
    page = 0;
    const hash = new URLSearchParams(wanted);
    if (words.length) hash.set("text", form.elements.text.value.trim());
    history.replaceState(null, "", "#" + hash);
    for (const cell of cells) cell.setAttribute("aria-pressed", String(pressed(cell)));
    draw();
  };
  const restore = () => {
    const hash = new URLSearchParams(location.hash.slice(1));
    for (const field of FIELDS) {
      const want = hash.get(field) || "";
      form.elements[field].value = [...form.elements[field].options].some((o) => o.value === want) ? want : "";
    }
    form.elements.text.value = hash.get("text") || "";
    apply();
  };

  // The matrix: a cell sets the filters; arrow keys walk it.
  const cells = [...document.querySelectorAll(".matrix button")];
  const single = form.elements.implementation.length <= 2;
  const wants = (cell) => ({
    implementation: single ? "" : cell.dataset.implementation, op: cell.dataset.op, judgment: cell.dataset.judgment,
    axis: cell.dataset.axis === undefined ? "none" : "=" + cell.dataset.axis,
  });
  const pressed = (cell) => Object.entries(wants(cell)).every(([field, want]) => form.elements[field].value === want);
  const STEP = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  for (const cell of cells) {
    cell.addEventListener("click", () => {
      const clear = pressed(cell);
      form.reset();
      if (!clear) for (const [field, want] of Object.entries(wants(cell))) form.elements[field].value = want;
      apply();
      if (!clear) document.getElementById("records").scrollIntoView({ block: "start" });
    });
    cell.addEventListener("keydown", (event) => {
      if (!STEP[event.key]) return;
      event.preventDefault();
      const [down, right] = STEP[event.key];
      const rows = [...cell.closest("tbody").rows];
      let row = rows.indexOf(cell.closest("tr")), column = cell.closest("td").cellIndex;
      for (;;) {
        row += down; column += right;
        const next = rows[row] && rows[row].cells[column];
        if (!next || next.tagName !== "TD") return;
        const button = next.querySelector("button");
        if (button) return button.focus();
      }
    });
  }

  document.getElementById("previous").addEventListener("click", () => { page--; draw(); list.scrollIntoView(); });
  document.getElementById("next").addEventListener("click", () => { page++; draw(); list.scrollIntoView(); });
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", apply);
  form.addEventListener("reset", () => setTimeout(apply));
  addEventListener("hashchange", restore);
  addEventListener("beforeprint", () => { document.querySelector("header details").open = true; });
  form.hidden = false;
  restore();
})();
