// Drives a server of tests/serve/made.py with npm's `openai`: node client.mjs BASE_URL KEY
import assert from 'node:assert/strict'
import OpenAI from 'openai'

const [baseURL, apiKey] = process.argv.slice(2)
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0, timeout: 60_000 })
const model = 'tiny'
const user = (content) => [{ role: 'user', content }]
const tools = [{
  type: 'function',
  function: { name: 'add', parameters: { type: 'object', properties: { a: { type: 'integer' }, b: { type: 'integer' } } } },
}]
const call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'

const whole = await client.chat.completions.create({ model, messages: user('say: t</think>Grüße 😀'), seed: 1 })
assert.equal(whole.choices[0].message.content, 'Grüße 😀')
assert.equal(whole.choices[0].message.reasoning, 't')
assert.equal(whole.choices[0].finish_reason, 'stop')

let text = ''
let usage = null
const stream = await client.chat.completions.create({
  model, messages: user('say: t</think>Grüße 😀'), stream: true, stream_options: { include_usage: true },
})
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta?.content ?? ''
  usage = chunk.usage ?? usage
}
assert.equal(text, 'Grüße 😀')
assert.equal(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens)

const assembled = await client.chat.completions.stream({ model, messages: user(`say: t</think>${call}`), tools }).finalChatCompletion()
assert.equal(assembled.choices[0].finish_reason, 'tool_calls')
assert.equal(assembled.choices[0].message.tool_calls[0].function.name, 'add')
assert.deepEqual(JSON.parse(assembled.choices[0].message.tool_calls[0].function.arguments), { a: 1, b: 2 })

const parsed = await client.chat.completions.parse({
  model, messages: user('hi'), max_tokens: 200, chat_template_kwargs: { enable_thinking: false },
  response_format: {
    type: 'json_schema',
    json_schema: {
      name: 'p', strict: true,
      schema: { type: 'object', properties: { x: { type: 'boolean' } }, required: ['x'], additionalProperties: false },
    },
  },
})
assert.equal(typeof parsed.choices[0].message.parsed.x, 'boolean')

const completion = await client.completions.create({ model, prompt: ['say: a', 'say: b'] })
assert.deepEqual(completion.choices.map((c) => c.text), ['a', 'b'])

// breaking off a stream in the middle
const long = await client.chat.completions.create({ model, messages: user('hi'), stream: true, ignore_eos: true })
for await (const _ of long) break

const models = []
for await (const one of client.models.list()) models.push(one.id)
assert.deepEqual(models, [model])
await assert.rejects(client.models.retrieve('gpt-9'), OpenAI.NotFoundError)
await assert.rejects(client.chat.completions.create({ model, messages: user('hi'), nonsense: 1 }), (error) => {
  assert.ok(error instanceof OpenAI.BadRequestError)
  assert.equal(error.param, 'nonsense')
  return true
})
console.log('all as it should be')
