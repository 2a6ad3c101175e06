// What is seen of an answer's steps: numbers, a bar each, the draft tree of the chosen one.

import { numbers } from "./answer.js";

const FULL = 8; // tokens that fill the strip; a longer step lowers every bar

/** An element. A string becomes a text node: nothing a model says is ever read as HTML. */
export function el(tag, props = {}, ...children) {
  const element = Object.assign(document.createElement(tag), props);
  element.append(...children);
  return element;
}

export const button = (textContent, onclick) => el("button", { type: "button", textContent, onclick });

/** The steps of one answer. choose(step, or -1) is told which one is shown. */
export class Steps {
  constructor(answer, choose) {
    Object.assign(this, { answer, choose, chosen: -1, numbers: el("dl"), picture: el("div"), title: el("h2") });
    this.strip = el("div", { className: "strip", role: "toolbar", ariaLabel: "Steps" });
    this.strip.onkeydown = move;
    const go = (name, to) => button(name, () => answer.steps[to()] && this.show(to()));
    const [back, next] = [go("Previous", () => this.chosen - 1), go("Next", () => this.chosen + 1)];
    const head = el("div", { className: "head" }, this.title, back, next, button("Close", () => this.show(-1)));
    this.box = el("section", { className: "tree", hidden: true, ariaLabel: "Draft tree" }, head, this.picture);
    this.element = el("div", {}, this.numbers, this.strip, this.box);
  }

  /** Show what the answer has become; the count of its last step may have changed. */
  update() {
    const { steps } = this.answer;
    const bars = this.strip.children;
    const from = bars.length;
    const entry = ([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value));
    this.numbers.replaceChildren(...Object.entries(numbers(this.answer)).map(entry));
    for (let at = Math.max(0, from - 1); at < steps.length; at++) {
      if (at >= from) this.strip.append(this.bar(at));
      paint(bars[at], steps[at], at);
    }
    this.strip.style.setProperty("--full", Math.max(FULL, ...steps.map((step) => step.tokens)));
    if (from < steps.length && this.chosen < 0) this.strip.scrollLeft = this.strip.scrollWidth;
  }

  bar(at) {
    const bar = button("", () => this.show(at === this.chosen ? -1 : at));
    Object.assign(bar, { ariaPressed: "false", tabIndex: at ? -1 : 0 }).append(el("i"));
    return bar;
  }

  /** Show the tree of a step, or none (-1). */
  show(at) {
    const bars = this.strip.children;
    if (this.chosen >= 0) bars[this.chosen].ariaPressed = "false";
    this.chosen = at;
    this.box.hidden = at < 0;
    if (at >= 0) {
      bars[at].ariaPressed = "true";
      this.title.textContent = words(this.answer.steps[at], at);
      this.picture.replaceChildren(...picture(this.answer.steps[at]));
    }
    this.choose(at);
  }
}

/** One bar is in the tab order; the arrow keys go on from there. */
function move(event) {
  const from = event.target;
  const to = { ArrowLeft: from.previousSibling, ArrowRight: from.nextSibling }[event.key];
  if (!to) return;
  event.preventDefault();
  [from.tabIndex, to.tabIndex] = [-1, 0];
  to.focus();
}

function paint(bar, step, at) {
  bar.title = bar.ariaLabel = words(step, at);
  bar.style.setProperty("--tokens", step.tokens);
  bar.style.setProperty("--accepted", step.accepted);
}

function words({ tokens, accepted, nodes }, at) {
  const drafts = nodes ? `${accepted} of ${nodes} drafted nodes accepted` : "no draft";
  return `Step ${at + 1}: ${drafts}, ${tokens} token${tokens > 1 ? "s" : ""}`;
}

function picture({ tree, nodes }) {
  if (!tree) return [nodes ? "Its tree was not kept." : "The target wrote it alone."];
  const note = el("p", {}, "Percent: what the drafter gave the path up to that token.");
  return [el("div", { className: "scroll", tabIndex: 0 }, nested(tree)), note];
}

/** Nested lists, which CSS draws as a tree: under each node the accepted child first, then the likelier ones. */
function nested({ tokens, parent, logw, path }) {
  const taken = new Set(path);
  const list = (above) => {
    const nodes = [...tokens.keys()].filter((node) => parent[node] === above);
    nodes.sort((a, b) => taken.has(b) - taken.has(a) || logw[b] - logw[a]);
    return nodes.length ? el("ul", {}, ...nodes.map((node) => el("li", {}, label(node), list(node)))) : "";
  };
  const label = (node) => {
    const [mark, name] = node && taken.has(node) ? ["✓", "node taken"] : ["", "node"];
    const chance = el("small", {}, node ? percent(Math.exp(logw[node])) : "before");
    return el("div", { className: name }, mark, el("code", {}, visible(tokens[node])), chance);
  };
  return list(-1);
}

const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;
const visible = (text) => text.replace(/ /g, "·").replace(/\n/g, "↵").replace(/\t/g, "⇥");
