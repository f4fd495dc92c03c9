// What the unmodified OpenAI SDK for Node makes of a server, as one line of JSON.
// Usage: NODE_PATH=node_modules node openai_sdk.cjs BASE_URL
const { OpenAI } = require("openai");

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "any", maxRetries: 0 });
const messages = [{ role: "user", content: "Say it." }];
const chat = { model: "scripted", messages, n: 2, logprobs: true, top_logprobs: 2 };
const text = { model: "scripted", prompt: ["hi", "you"], max_tokens: 3, echo: true, logprobs: 1 };

async function collect(stream) {
  const choices = [];
  for await (const chunk of stream) {
    for (const choice of chunk.choices) {
      const known = (choices[choice.index] ??= { text: "", tokens: [], finish: null });
      known.text += choice.text ?? choice.delta.content ?? "";
      for (const entry of choice.logprobs?.content ?? []) known.tokens.push(entry.token);
      known.tokens.push(...(choice.logprobs?.tokens ?? []));
      known.finish = choice.finish_reason ?? known.finish;
    }
  }
  return choices;
}

function whole(response) {
  return response.choices.map((choice) => ({
    text: choice.text ?? choice.message.content,
    tokens: choice.logprobs.tokens ?? choice.logprobs.content.map((entry) => entry.token),
    finish: choice.finish_reason,
  }));
}

async function helper() {
  const stream = client.chat.completions.stream({ ...chat, stream: true });
  let deltas = "";
  stream.on("content", (delta) => (deltas += delta));
  const final = await stream.finalChatCompletion();
  return { deltas, choices: whole(final) };
}

async function failure() {
  try {
    await client.chat.completions.create({ ...chat, top_logprobs: 21 });
  } catch (error) {
    return { status: error.status, param: error.param, code: error.code };
  }
}

async function main() {
  const answers = {
    chat: whole(await client.chat.completions.create(chat)),
    chatStream: await collect(await client.chat.completions.create({ ...chat, stream: true })),
    helper: await helper(),
    text: whole(await client.completions.create(text)),
    textStream: await collect(await client.completions.create({ ...text, stream: true })),
    failure: await failure(),
  };
  console.log(JSON.stringify(answers));
}

main();
