// The page: a chat that shows which words were drafted. send -> answer -> take (each chunk) -> update.

import { blank, plain, take } from "./answer.js";
import { button, el, Steps } from "./steps.js";
import { call, chunks } from "./stream.js";

const [CHAT, KEY] = ["draftproof.chat.1", "draftproof.key"];
const ENDS = { length: "The token limit ended it.", stopped: "Stopped.", left: "The page was left while it came." };
const $ = (id) => document.getElementById(id);
const [log, words, settings, dialog] = ["log", "words", "settings", "ask-key"].map($);

let chat = { turns: [], settings: {}, colours: true }; // a turn: {ask, answer}
let view = null; // of the last turn
let running = null; // AbortController of the coming answer

function send(event) {
  event.preventDefault();
  const ask = words.value.trim();
  if (running || !ask || !valid()) return;
  words.value = "";
  chat.turns.push({ ask });
  answer();
}

/** Ask the last question once more. */
function again() {
  if (running || !valid()) return;
  view.element.remove();
  answer();
  $("stop").focus();
}

function valid() {
  if (!settings.checkValidity()) $("panel").open = true;
  return settings.reportValidity();
}

const stop = (why = "stopped") => running?.abort(why);

async function answer() {
  const [turn, own] = [chat.turns.at(-1), new AbortController()];
  turn.answer = blank();
  const seen = (view = show(turn));
  const began = performance.now();
  busy(own);
  save();
  try {
    for await (const chunk of chunks(request(), sessionStorage.getItem(KEY), own.signal)) {
      take(turn.answer, chunk, performance.now() - began);
      seen.update();
    }
  } catch (error) {
    turn.answer.state = own.signal.reason ?? "failed";
    turn.answer.note = error.message;
    if (error.status === 401) askKey(error.message);
  }
  if (running === own) busy(null);
  seen.end();
  save();
}

/** The request for the last turn: all that was said, and the settings that are not the server's. */
function request() {
  const { system, temperature, max_tokens, seed, budget, nodes } = chat.settings;
  const messages = chat.turns.flatMap((turn) => [
    { role: "user", content: turn.ask },
    { role: "assistant", content: plain(turn.answer.content) },
  ]);
  messages.pop();
  if (system.trim()) messages.unshift({ role: "system", content: system });
  const stream = { stream: true, stream_options: { include_usage: true } };
  const body = { model: "default", messages, ...stream, draft_details: true };
  for (const [name, value] of Object.entries({ temperature, max_tokens, seed })) if (value) body[name] = Number(value);
  if (budget) body.speculation = { budget: budget === "nodes" ? Number(nodes) : budget };
  return body;
}

/** A run of text, coloured by its origin. */
function span([textContent, drafted, step]) {
  const element = el("span", { textContent, className: drafted ? "drafted" : "" });
  element.dataset.step = step;
  return element;
}

/** A turn in the log; `update` shows what its answer has become, `end` that no more will come. */
function show({ ask, answer }) {
  const thoughts = el("div");
  const text = el("div", { className: "text", ariaLive: "polite", ariaBusy: "true" });
  const reasoning = el("details", {}, el("summary", {}, "Reasoning"), thoughts);
  const note = el("p", { className: "note", role: "status" });
  const steps = new Steps(answer, (step) => {
    for (const run of [...thoughts.children, ...text.children]) run.classList.toggle("here", run.dataset.step == step);
    steps.element.scrollIntoView({ block: "nearest" });
  });
  const element = el("article", {}, el("p", { className: "ask" }, ask), reasoning, text, note, steps.element);

  const update = () => {
    const follow = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
    thoughts.append(...answer.reasoning.slice(thoughts.childElementCount).map(span));
    text.append(...answer.content.slice(text.childElementCount).map(span));
    reasoning.hidden = !answer.reasoning.length;
    steps.update();
    if (follow) log.scrollTop = log.scrollHeight;
  };
  const end = () => {
    update();
    text.ariaBusy = "false";
    note.textContent = ENDS[answer.state] ?? answer.note;
    if (answer.state !== "failed") return;
    note.classList.add("bad");
    note.append(" ", button("Retry", again));
    note.scrollIntoView({ block: "nearest" });
  };
  log.append(element);
  update();
  log.scrollTop = log.scrollHeight;
  return { element, update, end };
}

function busy(own) {
  const [here, there] = own ? [$("stop"), $("send")] : [$("send"), $("stop")];
  const focused = document.activeElement === there;
  running = own;
  here.hidden = false;
  there.hidden = true;
  if (focused) here.focus();
  $("again").disabled = own || !chat.turns.length;
  $("hint").hidden = chat.turns.length;
}

function newChat() {
  stop();
  chat.turns = [];
  log.replaceChildren($("hint"));
  busy(null);
  save();
  words.focus();
}

/** Trees are the most of a chat: where it is too large, the oldest go. */
function save() {
  try {
    sessionStorage.setItem(CHAT, JSON.stringify(chat));
    $("status").textContent = "";
  } catch {
    const large = chat.turns.flatMap((turn) => turn.answer.steps).filter((step) => step.tree);
    for (const step of large.slice(0, 100)) step.tree = null;
    if (large.length) save();
    else $("status").textContent = "This chat is too large to survive a reload.";
  }
}

function restore() {
  chat = JSON.parse(sessionStorage.getItem(CHAT)) ?? chat;
  for (const [name, value] of Object.entries(chat.settings)) settings.elements[name].value = value;
  $("colours").checked = chat.colours;
  for (const turn of chat.turns) {
    if (turn.answer.state === "running") turn.answer.state = "left";
    view = show(turn);
    view.end();
  }
  busy(null);
  changed();
}

function changed() {
  chat.settings = Object.fromEntries(new FormData(settings));
  chat.colours = $("colours").checked;
  document.body.classList.toggle("colourless", !chat.colours);
  const { nodes, budget } = settings.elements;
  nodes.parentElement.hidden = nodes.disabled = budget.value !== "nodes";
  save();
}

async function connect() {
  const key = sessionStorage.getItem(KEY);
  try {
    const models = await (await call("v1/models", key)).json();
    const info = await (await call("server_info", key)).json();
    const told = ["drafter", "method", "budget"].filter((name) => info[name] != null);
    $("model").textContent = [models.data[0].id, ...told.map((name) => `${name}\xa0${info[name]}`)].join(" · ");
  } catch (error) {
    $("model").textContent = error.message;
    if (error.status === 401) askKey(error.message);
  }
}

function askKey(why) {
  $("key-why").textContent = why;
  dialog.showModal();
}

dialog.onclose = () => {
  if (!$("key").value) return;
  sessionStorage.setItem(KEY, $("key").value);
  $("key").value = "";
  connect();
};
$("composer").onsubmit = send;
addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
  if (event.key === "Enter" && event.target === words && !event.shiftKey && !event.isComposing) send(event);
});
settings.onsubmit = (event) => event.preventDefault();
settings.oninput = $("colours").onchange = changed;
$("stop").onclick = () => stop();
$("again").onclick = again;
$("new").onclick = newChat;
addEventListener("pagehide", () => {
  stop("left");
  save();
});
restore();
connect();
words.focus();
