// Vercel's AI SDK: one case by one of its providers; prints what came, as JSON.
// node ai_sdk.cjs FOLDER URL PROVIDER CASE, FOLDER has the packages
"use strict";
const { createRequire } = require("node:module");
const path = require("node:path");

const [, , folder, url, provider, wanted] = process.argv;
const load = createRequire(path.join(folder, "package.json"));
const { embedMany, generateObject, generateText, stepCountIs, streamObject, streamText, tool } = load("ai");
const { createOpenAICompatible } = load("@ai-sdk/openai-compatible");
const { createOpenAI } = load("@ai-sdk/openai");
const { createAnthropic } = load("@ai-sdk/anthropic");
const { z } = load("zod");

// [models]
const settings = { baseURL: `${url}/v1`, apiKey: "none" };
const models = {
  compatible: (name) =>
    createOpenAICompatible({ name: "local", supportsStructuredOutputs: true, ...settings })(
      name,
    ),
  chat: (name) => createOpenAI(settings).chat(name),
  responses: (name) => createOpenAI(settings)(name),
  anthropic: (name) => createAnthropic(settings)(name),
};
// [/models]

// [embeddings]
const embedders = {
  compatible: (name) =>
    createOpenAICompatible({ name: "local", ...settings }).textEmbeddingModel(name),
  chat: (name) => createOpenAI(settings).textEmbeddingModel(name),
};
// [/embeddings]

const model = models[provider]("semantic-tiny");
const common = { model, maxRetries: 0, maxOutputTokens: 600 };
const hello = "My name is Ada and I live in Oslo.";
const question = "What is the weather in Oslo?";
const schema = z.object({ city: z.enum(["Oslo", "Rome"]) });

async function collected(pieces) {
  const found = [];
  for await (const piece of pieces) found.push(piece);
  return found;
}

const cases = {
  async text() {
    const { text, usage, finishReason } = await generateText({ ...common, prompt: hello });
    return { text, usage, finishReason };
  },
  async stream() {
    const reply = streamText({ ...common, prompt: hello });
    const pieces = await collected(reply.textStream);
    return { pieces, usage: await reply.usage, finishReason: await reply.finishReason };
  },
  async turns() {
    const messages = [{ role: "user", content: hello }];
    const first = await generateText({ ...common, messages });
    messages.push(...first.response.messages, { role: "user", content: "What is my name?" });
    const second = await generateText({ ...common, messages });
    return { text: second.text, usages: [first.usage, second.usage] };
  },
  async object() {
    return (await generateObject({ ...common, schema, prompt: question })).object;
  },
  async stream_object() {
    const reply = streamObject({ ...common, schema, prompt: question });
    await collected(reply.partialObjectStream);
    return await reply.object;
  },
  async tool() {
    const heard = [];
    const weather = tool({
      description: "The weather of a city.",
      inputSchema: schema,
      execute: async ({ city }) => {
        heard.push(city);
        return `It is sunny in ${city}.`;
      },
    });
    const reply = streamText({
      ...common,
      prompt: question,
      tools: { weather },
      toolChoice: { type: "tool", toolName: "weather" },
      stopWhen: stepCountIs(1),
    });
    const kinds = (await collected(reply.fullStream)).map((part) => part.type);
    return { heard, kinds: [...new Set(kinds)], finishReason: await reply.finishReason };
  },
  async embeddings() {
    const values = ["Oslo is in Norway.", "Rome is in Italy."];
    const model = embedders[provider]("tiny-vectors");
    return { vectors: (await embedMany({ model, values, maxRetries: 0 })).embeddings };
  },
  async error() {
    try {
      await generateText({ ...common, model: models[provider]("nobody"), prompt: hello });
    } catch (error) {
      return { status: error.statusCode, message: error.message };
    }
    return {};
  },
};

cases[wanted]().then((found) => console.log(JSON.stringify(found)));
