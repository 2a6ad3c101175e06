// One answer as plain data, and what the chunks of a stream add to it.

/** A run is [text, drafted, step], a step {tokens, accepted, nodes, tree}; first and last: ms after the request;
 * waiting: runs of the steps whose text has not come. */
export const blank = () => ({
  reasoning: [], content: [], steps: [], waiting: [], first: null, last: null, state: "running", note: "",
});

export const plain = (runs) => runs.map(([text]) => text).join("");

/** Add a chunk that came `at` ms after the request. */
export function take(answer, chunk, at) {
  const choice = chunk.choices[0];
  if (choice) {
    if (choice.draft) takeStep(answer, choice.draft, at);
    for (const part of ["reasoning", "content"]) {
      if (choice.delta[part]) answer[part].push(...coloured(answer, choice.delta[part]));
    }
    answer.state = choice.finish_reason ?? answer.state;
  }
  if (chunk.usage) settle(answer, chunk.usage.completion_tokens);
}

function takeStep(answer, { pieces, accepted, nodes, tree }, at) {
  answer.first ??= at;
  answer.last = at;
  answer.waiting.push(...pieces.map((piece) => [piece.text, piece.drafted, answer.steps.length]));
  answer.steps.push({ tokens: accepted + 1, accepted, nodes, tree }); // the last is the target's own
}

/** A limit may have cut the last step short: make the steps add up to what the server counted. */
function settle(answer, tokens) {
  const last = answer.steps.at(-1);
  if (last) last.tokens = Math.max(1, last.tokens + tokens - total(answer));
}

/** Runs of a text. A parser may have taken tags out, so it is looked for in what waits; without a find, no colour. */
function coloured(answer, text) {
  let skip = plain(answer.waiting).indexOf(text);
  if (skip < 0) {
    answer.waiting = [];
    return [[text, false, answer.steps.length - 1]];
  }
  const runs = [];
  for (let left = text.length; left; ) {
    const [piece, drafted, step] = answer.waiting.shift();
    const part = piece.slice(skip, skip + left);
    const rest = piece.slice(skip + left);
    if (part) runs.push([part, drafted, step]);
    if (rest) answer.waiting.unshift([rest, drafted, step]);
    skip = Math.max(0, skip - piece.length);
    left -= part.length;
  }
  return runs;
}

const sum = (values) => values.reduce((a, b) => a + b, 0);
const total = (answer) => sum(answer.steps.map((step) => step.tokens));
const fixed = (value, digits) => (Number.isFinite(value) ? value.toFixed(digits) : "–");

/** The numbers of an answer as words, by name; a dash where there is none yet. */
export function numbers(answer) {
  const { steps, first, last } = answer;
  const drafts = steps.filter((step) => step.nodes);
  const tokens = total(answer);
  return {
    "tokens/s": fixed((1000 * (tokens - steps[0]?.tokens)) / (last - first), 1), // behind the first step
    "acceptance length": fixed(1 + sum(drafts.map((step) => step.accepted)) / drafts.length, 2),
    steps: steps.length,
    tokens,
    "drafted nodes": sum(steps.map((step) => step.nodes)),
    "first token, s": fixed(first === null ? NaN : first / 1000, 2),
  };
}
