// Writes each event into the tables row by row, and offers the actions on a row.
// Text never becomes markup (textContent): users choose the names of notebooks.
"use strict";

const { prefix, xsrf } = document.body.dataset;
const byId = (id) => document.getElementById(id);
const RETRY_MS = 1000;
let view = null;
let doing = new Set(); // "row act": asked for, and not answered yet

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function made(kind, properties = {}, ...children) {
  const node = Object.assign(document.createElement(kind), properties);
  node.append(...children);
  return node;
}

function fillCell(cell, row, { field, note, meter }) {
  if (!cell.firstElementChild) {
    cell.replaceChildren(made("span"), ...(meter ? [made("meter", { min: 0, max: 100, ariaHidden: "true" })] : []), made("small"));
  }
  setText(cell.querySelector("span"), String(row[field] ?? ""));
  if (meter) cell.querySelector("meter").value = row[meter];
  const small = cell.querySelector("small");
  setText(small, note ? String(row[note] ?? "") : "");
  small.hidden = !small.textContent;
}

function fillActions(cell, kind, row) {
  const acts = row.actions ?? [];
  const wanted = acts.join(" ");
  if (cell.dataset.acts !== wanted) {
    cell.dataset.acts = wanted;
    const focused = cell.contains(document.activeElement) ? document.activeElement.dataset.act : null;
    cell.replaceChildren(...acts.map((act) => {
      const button = made("button", { type: "button", textContent: ACTS[act].label });
      button.dataset.act = act;
      button.setAttribute("aria-label", `${ACTS[act].label} ${row.name}${row.owner ? ` of ${row.owner}` : ""}`);
      if (act === "evict") button.className = "danger";
      button.addEventListener("click", () => begin(kind, cell.parentElement.dataset.id, act));
      return button;
    }));
    if (focused) (cell.querySelector(`[data-act="${focused}"]`) ?? cell.querySelector("button"))?.focus();
  }
  // Not `disabled`: the button would lose the focus.
  for (const button of cell.querySelectorAll("button")) button.ariaDisabled = String(doing.has(`${row.id} ${button.dataset.act}`));
}

function fillTable(table, rows) {
  const columns = [...table.tHead.rows[0].cells].map((head) => ({ ...head.dataset, label: head.textContent, actions: "actions" in head.dataset }));
  const body = table.tBodies[0];
  const there = new Map([...body.rows].filter((tr) => tr.dataset.id && tr.dataset.live).map((tr) => [tr.dataset.id, tr]));
  const wanted = rows.map((row) => {
    const tr = there.get(row.id) ?? made("tr", { role: "row" }, ...columns.map(() => made("td", { role: "cell" })));
    tr.dataset.id = row.id;
    tr.dataset.live = "yes";
    tr.dataset.phase = row.waits ? "waiting" : row.phase ?? row.state ?? "";
    columns.forEach((column, at) => {
      tr.cells[at].dataset.label = column.label;
      if (column.actions) fillActions(tr.cells[at], table.id, row);
      else fillCell(tr.cells[at], row, column);
    });
    return tr;
  });
  if (!wanted.length) {
    const cell = made("td", { role: "cell", colSpan: columns.length, textContent: table.dataset.empty });
    wanted.push(made("tr", { role: "row", className: "empty" }, cell));
    if (body.rows.length === 1 && body.rows[0].className === "empty") return;
  }
  if (wanted.length !== body.rows.length || wanted.some((tr, at) => body.rows[at] !== tr)) {
    const focused = document.activeElement, held = body.contains(focused); // moving a row takes the focus off its buttons
    body.replaceChildren(...wanted);
    if (held && focused !== document.activeElement) (body.contains(focused) ? focused : table.closest(".scroll")).focus();
  }
}

function show(fresh) {
  const told = view ? changes(view, fresh) : "";
  view = fresh;
  byId("simulated").hidden = !view.simulated;
  setProblem(view.problem);
  setText(byId("summary"), view.summary);
  for (const table of document.querySelectorAll("main table[id]")) fillTable(table, view[table.id] ?? []);
  if (told) say(told);
}

// A table wider than the screen can have the focus, to be scrolled with the arrow keys; one that fits cannot.
const widths = new ResizeObserver((sized) => {
  for (const box of new Set(sized.map(({ target }) => target.closest(".scroll")))) box.tabIndex = box.scrollWidth > box.clientWidth ? 0 : -1;
});
for (const node of document.querySelectorAll(".scroll, .scroll > table")) widths.observe(node);

function setProblem(sentence) {
  const problem = byId("problem");
  const text = sentence ? `What is shown may be out of date: ${sentence}.` : "";
  if (problem.textContent !== text) problem.textContent = text;
  problem.hidden = !text;
  document.body.classList.toggle("stale", Boolean(text));
}

// For screen readers: kernels and servers whose state has changed, devices being emptied, drained nodes. A node with several pools is
// announced once.
function changes(old, fresh) {
  const rows = (seen) => ["kernels", "devices", "nodes", "servers"].flatMap((table) => (seen[table] ?? []).map((row) => [`${table} ${row.id}`, row]));
  const before = new Map(rows(old)), told = new Set();
  for (const [key, row] of rows(fresh)) {
    const was = before.get(key);
    if (was && (was.phase !== row.phase || was.waits !== row.waits || (!row.phase && was.state !== row.state))) {
      told.add(`${row.name}${row.owner ? ` of ${row.owner}` : ""}: ${row.state}`);
    }
  }
  return told.size > 4 ? `${told.size} changes of state` : [...told].join("; ");
}

function say(sentence) {
  setText(byId("said"), sentence);
}

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function call(path, body) {
  const options = { headers: { "X-XSRFToken": xsrf }, cache: "no-store" };
  if (body !== undefined) {
    options.method = "POST";
    options.headers["Content-Type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  const reply = await fetch(`${prefix}api/${path}`, options);
  const said = await reply.json().catch(() => ({}));
  if (!reply.ok) throw new Refused(reply.status, said.error?.message ?? `the service answered ${reply.status}`);
  return said;
}

const lease = (act, body = () => ({})) => (row, fields) => call(`leases/${row.id}/${act}`, body(fields));
const device = (act, body = () => ({})) => (row, fields) => call(`devices/${encodeURIComponent(row.id)}/${act}`, body(fields));

const ACTS = {
  suspend: { label: "Suspend", done: "suspended", run: lease("suspend") },
  resume: { label: "Resume", done: "back on the GPU", run: lease("resume") },
  unpin: { label: "Unpin", done: "no longer pinned", run: lease("unpin") },
  pin: {
    label: "Pin…", done: "pinned", button: "Pin",
    text: () => "The kernel stays on its GPU for this long, even while others wait.",
    fields: () => [field("minutes", "Minutes", made("input", { type: "number", min: 1, max: 10080, value: 30, required: true }))],
    run: lease("pin", ({ minutes }) => ({ minutes: Number(minutes.value) })),
  },
  move: {
    label: "Move…", done: "moved", button: "Move",
    text: () => "The kernel's GPU memory goes through host memory to the other GPU, with every variable. It must be idle; a pin ends.",
    fields: (row) => {
      const there = view.devices.filter((one) => one.pool === row.pool && one.name !== row.where && !one.draining);
      const options = [["", "Any other of its pool"], ...there.map((one) => [one.id, `${one.name} (${one.memory})`])];
      return [field("device", "To", made("select", {}, ...options.map(([value, text]) => made("option", { value, textContent: text }))))];
    },
    run: lease("move", ({ device: chosen }) => ({ device: chosen.value || null })),
  },
  evict: {
    label: "Evict…", done: "ended", button: "End the kernel", danger: true,
    text: (row) => `This ends the kernel ${row.name} of ${row.owner}. All its variables are lost, for good. ` +
      "Suspending it frees the GPU just as well, and loses nothing.",
    run: lease("evict", () => ({ confirm: true })),
  },
  story: {
    label: "Why?", button: "Close", tells: true,
    text: (row) => `What happened to ${row.name}, and why; newest last.`,
    fields: async (row) => {
      const { lines, omitted } = await call(`leases/${row.id}/story`);
      const items = lines.map((line) => made("li", {}, made("time", { textContent: new Date(line.at_ms).toLocaleTimeString() }), ` ${line.sentence}`));
      if (omitted) items.unshift(made("li", { textContent: `${omitted} older lines are left out` }));
      return [made("ol", { className: "story", tabIndex: 0 }, ...items)];
    },
  },
  drain: {
    label: "Drain…", done: "being emptied", button: "Drain",
    text: (row) => `${row.name} admits no more kernels; idle kernels on it are suspended, and come back on another GPU where they can.`,
    fields: () => [field("busy", "Suspend kernels that run a cell, too", made("input", { type: "checkbox" }))],
    run: device("drain", ({ busy }) => ({ evict_busy: busy.checked })),
  },
  undrain: { label: "Undrain", done: "in service again", run: device("undrain") },
  release: {
    label: "Release…", done: "released", button: "Release the seat", danger: true,
    text: (row) => `The server ${row.server} of ${row.owner} gets no more kernels with a GPU until it is restarted. ` +
      "Its running kernels are suspended; their variables stay.",
    run: (row) => call(`seats/${row.id}/release`, { confirm: true }),
  },
  edit: {
    label: "Edit…", done: "changed", button: "Change",
    text: (row) => `A change of pool ${row.name} takes effect at once, and lasts until the broker restarts.`,
    fields: settings,
    run: (row, inputs) => {
      const changed = Object.values(inputs).filter((input) => input.value !== input.dataset.was);
      if (!changed.length) throw new Refused(400, "no setting has another value than before; change one, or cancel");
      const keys = Object.fromEntries(changed.map((input) => [input.name, read(input.value)]));
      return call(`pools/${encodeURIComponent(row.id)}`, { keys });
    },
  },
};

function read(text) {
  try { return JSON.parse(text); } catch { return text; }
}

// The inputs for a pool's settings, from the page's template: common ones, and the others in a part that opens. A broker of another version
// may not know a setting (left out), or know one for which the page has no help.
function settings(row) {
  const form = byId("pool-settings").content.cloneNode(true);
  const details = form.querySelector("details"), changed = row.changed.split(", ");
  for (const key of Object.keys(row.keys).sort()) {
    if (form.querySelector(`[name="${CSS.escape(key)}"]`)) continue;
    const input = made("input", { type: "text", id: `set-${key}`, name: key });
    const label = made("label", { htmlFor: input.id }, made("code", { textContent: key }));
    details.append(made("div", { className: "setting" }, label, made("small", { className: "changed", hidden: true }), input));
  }
  for (const input of form.querySelectorAll("[name]")) {
    const setting = input.closest(".setting"), value = row.keys[input.name];
    if (value === undefined) { setting.remove(); continue; }
    input.value = input.dataset.was = typeof value === "string" ? value : JSON.stringify(value);
    setting.querySelector(".changed").hidden = !changed.includes(input.name);
    const group = setting.querySelector(".choices");
    if (group) choose(group, input, value);
  }
  details.open = Boolean(details.querySelector(".changed:not([hidden])"));
  details.querySelector("summary").textContent = `All settings (${details.querySelectorAll("[name]").length} more)`;
  return [form];
}

// Checkboxes for a list: the choices, and its current values. `any` stands for every value.
function choose(group, input, value) {
  const now = [value].flat().map(String);
  for (const one of new Set([...group.dataset.choices.split(" "), ...now, "any"])) {
    group.append(made("label", {}, made("input", { type: "checkbox", value: one, checked: now.includes(one) }), one));
  }
  group.addEventListener("change", () => {
    const chosen = [...group.querySelectorAll(":checked")].map((box) => box.value);
    input.value = chosen.includes("any") ? "any" : JSON.stringify(chosen);
  });
}

// Focus the input that a refusal names.
function lead(inputs, message) {
  const named = [...message.matchAll(/\['([a-z_]+)'\]/g)].map(([, name]) => inputs[name]).find(Boolean);
  for (const input of Object.values(inputs)) input.removeAttribute("aria-invalid");
  if (!named) return;
  named.setAttribute("aria-invalid", "true");
  named.closest("details")?.setAttribute("open", "");
  (named.type === "hidden" ? named.nextElementSibling.querySelector("input") : named).focus();
}

function field(name, label, input) {
  input.name = name;
  return made("label", {}, made("span", { textContent: label }), input);
}

async function begin(kind, id, act) {
  const row = view[kind].find((one) => one.id === id);
  if (!row || doing.has(`${id} ${act}`)) return;
  if (ACTS[act].button) await ask(kind, row, act);
  else await perform(row, act, {}).catch((error) => say(`${row.name} was not changed: ${error.message}.`));
}

async function perform(row, act, fields) {
  const key = `${row.id} ${act}`;
  doing.add(key);
  say(`${row.name}: asked to ${ACTS[act].label.replace("…", "").toLowerCase()} …`);
  show(view);
  try {
    const answer = await ACTS[act].run(row, fields);
    say(`${row.name}: ${ACTS[act].done}.${answer?.note ? ` Note: ${answer.note}` : ""}`);
  } finally {
    doing.delete(key);
    show(view);
  }
}

let asked = null; // of which table and row the dialog is

async function ask(kind, row, act) {
  asked = { kind, id: row.id };
  const { label, button, danger, tells, text, fields } = ACTS[act];
  const dialog = byId("ask"), problem = byId("ask-problem"), yes = byId("ask-yes");
  setText(byId("ask-title"), `${label.replace("…", "")} ${row.name}`);
  setText(byId("ask-text"), text(row));
  setText(problem, "");
  setText(yes, button);
  yes.className = danger ? "danger main" : "main";
  yes.disabled = false;
  byId("ask-no").hidden = Boolean(tells);
  byId("ask-fields").replaceChildren();
  dialog.showModal();
  if (fields) {
    try { byId("ask-fields").replaceChildren(...await fields(row)); } catch (error) { setText(problem, error.message); }
  }
  (dialog.querySelector("#ask-fields input:not([type=hidden]), #ask-fields select") ?? byId(tells || !danger ? "ask-yes" : "ask-no")).focus();
  yes.onclick = async () => {
    if (tells) return dialog.close();
    const inputs = Object.fromEntries([...dialog.querySelectorAll("[name]")].map((input) => [input.name, input]));
    yes.disabled = true;
    setText(problem, "");
    try {
      await perform(row, act, inputs);
      dialog.close();
    } catch (error) {
      setText(problem, `${error.message}.`);
      lead(inputs, error.message);
      say("");
    } finally {
      yes.disabled = false;
      if (dialog.open && !dialog.querySelector(":focus")) yes.focus();
    }
  };
}

byId("ask-no")?.addEventListener("click", () => byId("ask").close());
// The browser returns the focus to the button that opened the dialog, which the action may have replaced.
byId("ask")?.addEventListener("close", () => {
  if (document.activeElement !== document.body) return;
  const table = byId(asked.kind), row = [...table.tBodies[0].rows].find((tr) => tr.dataset.id === asked.id);
  (row?.querySelector("button") ?? table.closest(".scroll")).focus();
});
byId("ask")?.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && event.target.tagName === "INPUT") byId("ask-yes").click();
});

// Not an EventSource: that cannot send the XSRF token, and does not say why it was refused.
async function follow() {
  const reply = await fetch(`${prefix}api/events`, { headers: { "X-XSRFToken": xsrf, Accept: "text/event-stream" }, cache: "no-store" });
  if (reply.status === 401 || reply.status === 403) return again();
  if (!reply.ok) throw new Refused(reply.status, (await reply.json()).error.message);
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let kept = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return undefined;
    const events = (kept + value).split("\n\n");
    kept = events.pop();
    const news = events.filter((event) => event.startsWith("data: ")).pop();
    if (news) {
      sessionStorage.removeItem("again");
      show(JSON.parse(news.slice(6)));
    }
  }
}

// Logged out, or the service is a new process: a page view goes through the hub's login. Only once; then the user decides.
function again() {
  if (sessionStorage.getItem("again")) throw new Refused(403, "you are logged out, or may not see this page any more; load it again");
  sessionStorage.setItem("again", "yes");
  location.reload();
  return new Promise(() => {});
}

async function live() {
  for (;;) {
    try {
      await follow();
    } catch (error) {
      setProblem(error instanceof Refused ? error.message.replace(/\.$/, "") : "the page's service is not responding");
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

live();
