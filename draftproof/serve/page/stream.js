// The network: requests, streams, and every failure in words.

/** A failure in words. status: of HTTP, 0 where there was no answer. */
export class Trouble extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** The answer to a request, or a Trouble; an abort stays an AbortError. */
export async function call(path, key, options = {}) {
  const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
  let answer;
  try {
    answer = await fetch(path, { ...options, headers });
  } catch (error) {
    throw error instanceof TypeError ? new Trouble("The server cannot be reached.") : error;
  }
  if (answer.ok) return answer;
  const { error } = await answer.json().catch(() => ({}));
  const words = error?.message ?? `The server answered ${answer.status}.`;
  const wait = answer.headers.get("retry-after");
  throw new Trouble(words + (wait ? ` (try again in ${wait} s)` : ""), answer.status);
}

/** The data of each event of a stream, whose chunks may be cut inside an event or a character. */
export async function* events(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let text = "";
  for (let done = false; !done; ) {
    const read = await reader.read();
    done = read.done;
    text += decoder.decode(read.value, { stream: !done });
    const blocks = text.split(/\r?\n\r?\n/);
    text = blocks.pop();
    for (const block of blocks) {
      const lines = block.split(/\r?\n/).filter((line) => line.startsWith("data:"));
      if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
    }
  }
}

/** The chunks of a chat completion until its [DONE]; a Trouble where it fails or breaks off. */
export async function* chunks(request, key, signal) {
  const body = JSON.stringify(request);
  const answer = await call("v1/chat/completions", key, { method: "POST", body, signal });
  try {
    for await (const data of events(answer.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Trouble(chunk.error.message);
      yield chunk;
    }
  } catch (error) {
    if (!(error instanceof TypeError)) throw error; // browsers raise it for a lost connection
  }
  throw new Trouble("The connection broke off before the answer ended.");
}
