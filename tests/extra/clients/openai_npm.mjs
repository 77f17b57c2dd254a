// Suite 5: the `openai` npm package before a gateway of ours: answers, streams, tools, and aborts that reach the engine.
// $EXTRA_BASE_URL: the gateway with /v1. $EXTRA_SCRIPTED_URL: the engine behind it. $EXTRA_NODE_FOLDER: where openai is.
import assert from "node:assert/strict";
import { createRequire } from "node:module";

const { OpenAI, NotFoundError, BadRequestError, APIUserAbortError } = createRequire(`${process.env.EXTRA_NODE_FOLDER}/`)("openai");
const client = new OpenAI({ baseURL: process.env.EXTRA_BASE_URL, apiKey: "any", maxRetries: 0, timeout: 60_000 });
const model = "scripted";
const ENGINE_SEES_ABORT_MS_MAX = 5_000;
const weather = {
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather at a place.",
    parameters: { type: "object", properties: { location: { type: "string" } }, required: ["location"] },
  },
};

const says = (content, more = {}) => ({ model, messages: [{ role: "user", content }], ...more });
const counts = async () => (await fetch(`${process.env.EXTRA_SCRIPTED_URL}/counts`)).json();

/** Runs `leave` and waits until the engine has one more request that its client left, and none that runs. */
async function engineSees(leave) {
  const before = await counts();
  await leave();
  const deadline = Date.now() + ENGINE_SEES_ABORT_MS_MAX;
  for (;;) {
    const now = await counts();
    if (now.left === before.left + 1 && now.running === 0) return;
    assert(Date.now() < deadline, `the engine still runs it: ${JSON.stringify({ before, now })}`);
    await new Promise((done) => setTimeout(done, 50));
  }
}

async function until(condition, what) {
  const deadline = Date.now() + ENGINE_SEES_ABORT_MS_MAX;
  while (!(await condition())) {
    assert(Date.now() < deadline, what);
    await new Promise((done) => setTimeout(done, 50));
  }
}

const tests = {
  async "the models are listed and found, by an alias too"() {
    const names = [];
    for await (const one of client.models.list()) names.push(one.id);
    assert(names.includes("scripted") && names.includes("embedder"), names.join());
    assert.equal((await client.models.retrieve("scripted")).object, "model");
    assert.equal((await client.models.retrieve("scripted-too")).object, "model");
  },

  async "a whole answer has text, reason, usage and an id of ours"() {
    const answer = await client.chat.completions.create(says("hello 🎉 你好"));
    assert.equal(answer.choices[0].message.content, "You said: hello 🎉 你好");
    assert.equal(answer.choices[0].finish_reason, "stop");
    assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
    assert.match(answer.id, /^chatcmpl-/);
    assert(answer._request_id, "no x-request-id");
  },

  async "a stream is the whole answer in pieces"() {
    const text = "one two three 👩‍👩‍👧 東京";
    let whole = "";
    let reason = null;
    const ids = new Set();
    for await (const chunk of await client.chat.completions.create(says(text, { stream: true }))) {
      whole += chunk.choices[0]?.delta?.content ?? "";
      reason = chunk.choices[0]?.finish_reason ?? reason;
      ids.add(chunk.id);
      assert.equal(chunk.usage ?? null, null, "usage that nobody asked for");
    }
    assert.equal(whole, `You said: ${text}`);
    assert.equal(reason, "stop");
    assert.equal(ids.size, 1);
  },

  async "usage comes once in a stream that asks for it"() {
    const usages = [];
    const body = says("count", { stream: true, stream_options: { include_usage: true } });
    for await (const chunk of await client.chat.completions.create(body)) if (chunk.usage) usages.push(chunk);
    assert.equal(usages.length, 1);
    assert.deepEqual(usages[0].choices, []);
    assert(usages[0].usage.completion_tokens > 0);
  },

  async "the stream helper gathers parallel calls"() {
    const body = says("What is the weather in Paris and in Rome?", { tools: [weather] });
    const answer = await client.chat.completions.stream(body).finalChatCompletion();
    const places = answer.choices[0].message.tool_calls.map((call) => JSON.parse(call.function.arguments).location);
    assert.deepEqual(places, ["Paris", "Rome"]);
    assert.equal(answer.choices[0].finish_reason, "tool_calls");
  },

  async "runTools calls the function and sends its result back"() {
    const asked = [];
    const tool = structuredClone(weather);
    tool.function.parse = JSON.parse;
    tool.function.function = ({ location }) => (asked.push(location), `sunny in ${location}`);
    const runner = client.chat.completions.runTools(says("What is the weather in Lima?", { tools: [tool] }));
    assert.equal(await runner.finalContent(), "The tool says: sunny in Lima");
    assert.deepEqual(asked, ["Lima"]);
  },

  async "a schema is kept to"() {
    const schema = {
      type: "object",
      properties: { city: { type: "string" }, people: { type: "integer" } },
      required: ["city", "people"],
      additionalProperties: false,
    };
    const format = { type: "json_schema", json_schema: { name: "place", schema, strict: true } };
    const answer = await client.chat.completions.parse(says("'Turin' has 850000", { response_format: format }));
    assert.deepEqual(JSON.parse(answer.choices[0].message.content), { city: "Turin", people: 850000 });
  },

  async "an image part comes to the engine as it is, and a link to one is refused"() {
    const url = `data:image/png;base64,${Buffer.from("not much of a picture").toString("base64")}`;
    const parts = (link) => [{ type: "text", text: "look" }, { type: "image_url", image_url: { url: link } }];
    const answer = await client.chat.completions.create(says(parts(url)));
    assert.equal(answer.choices[0].message.content, `You said: look [data:image/png;base64 ${url.length}]`);
    await assert.rejects(client.chat.completions.create(says(parts("http://127.0.0.1/a.png"))), BadRequestError);
  },

  async "log probabilities, choices, stop strings and the bound on tokens"() {
    const wanted = { n: 2, logprobs: true, top_logprobs: 1, stop: ["four"], max_tokens: 20 };
    const answer = await client.chat.completions.create(says("three four five", wanted));
    assert.equal(answer.choices.length, 2);
    for (const choice of answer.choices) {
      assert.equal(choice.message.content.trimEnd(), "You said: three");
      assert.equal(choice.logprobs.content.map((one) => one.token).join(""), choice.message.content);
    }
    const short = await client.chat.completions.create(says("a b c d e f", { max_completion_tokens: 3 }));
    assert.equal(short.choices[0].finish_reason, "length");
  },

  async "embeddings come as numbers, whatever the client asks for by itself"() {
    for (const encoding_format of [undefined, "float"]) {
      const answer = await client.embeddings.create({ model: "embedder", input: ["a", "b"], encoding_format });
      assert.equal(answer.data.length, 2);
      const length = Math.hypot(...answer.data[0].embedding);
      assert(Math.abs(length - 1) < 1e-3, `length ${length}`);
    }
  },

  async "completions, whole and streamed"() {
    const body = { model: "simulated", prompt: "Once", max_tokens: 5 };
    const answer = await client.completions.create(body);
    assert.equal(answer.usage.completion_tokens, 5);
    let text = "";
    for await (const chunk of await client.completions.create({ ...body, stream: true })) text += chunk.choices[0]?.text ?? "";
    assert.equal(text.trim().split(/\s+/).length, 5);
  },

  async "errors have the classes, codes and fields that the package knows"() {
    await assert.rejects(client.chat.completions.create({ ...says("x"), model: "nobody" }), (error) => {
      assert(error instanceof NotFoundError);
      assert.equal(error.code, "model_not_found");
      return true;
    });
    await assert.rejects(client.chat.completions.create(says("x", { temperature: 9 })), (error) => {
      assert(error instanceof BadRequestError);
      assert.equal(error.param, "temperature");
      return true;
    });
  },

  async "responses, whole and streamed"() {
    const answer = await client.responses.create({ model, input: "hello" });
    assert.equal(answer.output_text, "You said: hello");
    assert.equal(answer.status, "completed");
    const kinds = [];
    const stream = client.responses.stream({ model, input: "hello again" });
    for await (const event of stream) kinds.push(event.type);
    assert.equal(kinds[0], "response.created");
    assert.equal(kinds.at(-1), "response.completed");
    assert.equal((await stream.finalResponse()).output_text, "You said: hello again");
  },

  async "an abort of a stream reaches the engine"() {
    await engineSees(async () => {
      const stream = await client.chat.completions.create(says("speak slowly", { stream: true }));
      let pieces = 0;
      for await (const chunk of stream) if (chunk.choices[0]?.delta?.content && ++pieces === 3) break; // break aborts
    });
    await engineSees(async () => {
      const stream = await client.chat.completions.create(says("speak slowly", { stream: true }));
      for await (const _ of stream) stream.controller.abort();
    });
  },

  async "an abort of an answer that is not streamed reaches the engine"() {
    await engineSees(async () => {
      const controller = new AbortController();
      const answer = client.chat.completions.create(says("speak slowly"), { signal: controller.signal });
      const over = assert.rejects(answer, APIUserAbortError);
      await until(async () => (await counts()).running === 1, "the engine never got it");
      controller.abort();
      await over;
    });
  },

  async "an abort of a streamed response reaches the engine"() {
    await engineSees(async () => {
      const stream = await client.responses.create({ model, input: "speak slowly", stream: true });
      for await (const event of stream) if (event.type === "response.output_text.delta") break;
    });
  },
};

const passed = [];
const failures = [];
for (const [name, test] of Object.entries(tests)) {
  try {
    await test();
    passed.push(name);
  } catch (error) {
    failures.push(`${name}: ${String(error?.message ?? error).split("\n").slice(0, 3).join(" ").slice(0, 300)}`);
    console.error(name, error);
  }
}
console.log(JSON.stringify({ passed, failures }));
