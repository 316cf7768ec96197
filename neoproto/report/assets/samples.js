// Validation samples: a table that can be filtered, and one question across steps and runs.

const SHOWN_AT_ONCE = 40;

function verdict(accuracy) {
  if (accuracy === null) return "";
  return accuracy >= 1 ? "right" : accuracy <= 0 ? "wrong" : "partly";
}

function sampleRows(samples) {
  const found = [];
  samples.rows.forEach((rows, run) => {
    for (const [question, step, label, answer, score, accuracy] of rows) {
      found.push({ run, question, step, label, answer, score, accuracy, verdict: verdict(accuracy) });
    }
  });
  // The runs' answers to a question stand below each other.
  return found.sort((a, b) => a.question - b.question || a.step - b.step || a.label - b.label || a.run - b.run);
}

// Questions answered wrong at the first step shown and right at the last, or the other way round, per run and way of drawing.
function turned(rows) {
  const ends = new Map();
  for (const row of rows) {
    const key = `${row.run} ${row.question} ${row.label}`;
    const end = ends.get(key) || { first: row, last: row };
    if (row.step < end.first.step) end.first = row;
    if (row.step > end.last.step) end.last = row;
    ends.set(key, end);
  }
  return (row) => {
    const { first, last } = ends.get(`${row.run} ${row.question} ${row.label}`);
    if (first.step === last.step || first.verdict === last.verdict) return "";
    return last.accuracy > first.accuracy ? "learned" : "forgotten";
  };
}

function samplesSection() {
  const samples = DATA.samples;
  if (!samples) return null;
  const rows = sampleRows(samples);
  const change = turned(rows);
  const texts = samples.questions.map((question) => question.join("\n").toLowerCase());
  const steps = [...new Set(rows.map((row) => row.step))].sort((a, b) => a - b);
  const several = DATA.runs.length > 1;

  const text = el("input", { type: "search", id: "samples-text", placeholder: "text of question or answer", "aria-label": "text" });
  const step = options(el("select", { id: "samples-step" }), [["", "all"], ...steps.map((one) => [one, one])]);
  step.value = steps.length ? String(steps[steps.length - 1]) : "";
  const correct = options(el("select", { id: "samples-correct" }), [["", "all"], ["right", "right"], ["wrong", "wrong"], ["partly", "partly right"],
    ["learned", "wrong at first, right at the end"], ["forgotten", "right at first, wrong at the end"]]);
  const label = options(el("select", { id: "samples-label" }), [["", "all"], ...samples.labels.map((one, index) => [index, one])]);
  const run = options(el("select", { id: "samples-run" }), [["", "all"], ...DATA.runs.map((one, index) => [index, one.name])]);
  const count = el("span", { class: "soft", id: "samples-count" });
  const body = el("tbody");
  const more = el("button", { class: "plain", type: "button", onclick: () => { limit += 5 * SHOWN_AT_ONCE; show(); } }, "show more");
  const detail = el("div", { class: "card", id: "sample-detail" });
  const controls = [text, step, correct, label, ...(several ? [run] : [])];
  let limit = SHOWN_AT_ONCE;
  let chosen = (rows.find((row) => change(row) === "learned") || rows[0]).question;

  function matches(row) {
    if (step.value !== "" && row.step !== Number(step.value)) return false;
    if (label.value !== "" && row.label !== Number(label.value)) return false;
    if (run.value !== "" && row.run !== Number(run.value)) return false;
    if (["learned", "forgotten"].includes(correct.value) ? change(row) !== correct.value : correct.value !== "" && row.verdict !== correct.value) return false;
    const wanted = text.value.trim().toLowerCase();
    return !wanted || texts[row.question].includes(wanted) || row.answer.toLowerCase().includes(wanted);
  }

  function tableRow(row) {
    const question = samples.questions[row.question];
    const pick = () => { chosen = row.question; compare(); show(); };
    return el("tr", { class: `pick${row.question === chosen ? " chosen" : ""}`, tabindex: "0", onclick: pick,
      onkeydown: (event) => { if (event.key === "Enter") pick(); } },
      several ? el("td", {}, runDot(row.run)) : null,
      el("td", { class: "num" }, row.step),
      el("td", { class: "minor" }, samples.labels[row.label]),
      el("td", { class: "text" }, el("div", { class: "clamp" }, question[2])),
      el("td", { class: `text ${row.verdict}` }, el("div", { class: "clamp" }, row.answer)),
      el("td", { class: "text minor" }, el("div", { class: "clamp" }, question[3])),
      el("td", { class: "num" }, number(row.score)));
  }

  function show() {
    const found = rows.filter(matches);
    count.textContent = `${found.length.toLocaleString("en-US")} of ${rows.length.toLocaleString("en-US")} samples`;
    body.replaceChildren(...found.slice(0, limit).map(tableRow));
    more.classList.toggle("hidden", found.length <= limit);
  }

  function compare() {
    const [uid, source, prompt, truth] = samples.questions[chosen];
    const own = rows.filter((row) => row.question === chosen).sort((a, b) => a.step - b.step || a.run - b.run || a.label - b.label);
    const lines = own.map((row) => el("tr", {},
      several ? el("td", {}, runDot(row.run)) : null,
      el("td", { class: "num" }, row.step), el("td", {}, samples.labels[row.label]),
      el("td", { class: `text ${row.verdict}` }, row.answer), el("td", { class: "num" }, number(row.score))));
    const first = several ? ["", "step"] : ["step"];
    detail.replaceChildren(
      el("h3", {}, "One question across steps"), el("div", { class: "soft small" }, "Choose another in the table."), el("div", { class: "soft small" }, `${uid} · ${source}`),
      el("div", { class: "question" }, prompt),
      el("div", {}, el("span", { class: "soft" }, "expected: "), el("span", { class: "question" }, truth)),
      scrolled(table([...first, "draw", "answer", "score"], lines, (column) => column === first.length - 1 || column === first.length + 2)));
  }

  const restart = () => { limit = SHOWN_AT_ONCE; show(); };
  for (const control of controls) control.addEventListener("input", restart);
  const named = [["step", step], ["result", correct], ["draw", label], ...(several ? [["run", run]] : [])];
  const heads = [...(several ? [""] : []), "step", "draw", "question", "answer", "expected", "score"];
  const list = table(heads, [], (column) => ["step", "score"].includes(heads[column]));
  list.querySelector("tbody").replaceWith(body);
  list.querySelectorAll("th").forEach((cell, column) => cell.classList.toggle("minor", ["draw", "expected"].includes(heads[column])));
  const left = samples.all_questions - samples.questions.length;
  show();
  compare();
  return section("samples", "Samples",
    left ? el("div", { class: "note" }, `${samples.questions.length} of ${samples.all_questions} questions are on this page, to keep it small; all are in validation/.`) : null,
    el("div", { class: "controls" }, text, named.map(([name, control]) => el("label", {}, name, control)), count),
    el("div", { class: "split" }, el("div", { class: "card" }, scrolled(list), more), detail));
}

function scrolled(node) {
  node.classList.add("tall");
  return node;
}
