// Sessions of OpenAI's official Node client: `node node_sessions.mjs NAME CLIENT_JSON REQUEST_JSON`.
// The arguments are the session, the options of the client, and the fields of the request.
// Prints the client's result as JSON.
// The packages are imported from the folder $FAKEVLLM_CLIENTS_NPM, because modules ignore NODE_PATH.
import { pathToFileURL } from "node:url";

const [, , name, options, request] = process.argv;
const module = `${process.env.FAKEVLLM_CLIENTS_NPM}/node_modules/openai/index.mjs`;
const { default: OpenAI } = await import(pathToFileURL(module));
const client = new OpenAI(JSON.parse(options));
const fields = JSON.parse(request);

async function all(stream) {
  const parts = [];
  for await (const part of stream) parts.push(part);
  return parts;
}

const sessions = {
  models: async () => all(await client.models.list()),
  chat: () => client.chat.completions.create(fields),
  chat_stream: async () => all(await client.chat.completions.create({ ...fields, stream: true })),
  chat_helper: () => client.chat.completions.stream(fields).finalChatCompletion(),
  chat_parse: () => client.chat.completions.parse(fields),
  run_tools: async () => {
    const { messages, result, stream } = fields;
    const cities = [];
    const get_weather = {
      type: "function",
      function: {
        name: "get_weather",
        description: "Weather of a city",
        parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
        parse: JSON.parse,
        function: ({ city }) => {
          cities.push(city);
          return result;
        },
      },
    };
    const runner = client.chat.completions.runTools({ model: fields.model, messages, stream, tools: [get_weather] });
    return { cities, content: await runner.finalContent(), usage: await runner.totalUsage() };
  },
  completions: () => client.completions.create(fields),
  responses: () => client.responses.create(fields),
  responses_stream: async () => all(await client.responses.create({ ...fields, stream: true })),
  responses_helper: () => client.responses.stream(fields).finalResponse(),
};

let result;
try {
  result = { answer: await sessions[name]() };
} catch (error) {
  if (!(error instanceof OpenAI.OpenAIError)) throw error;
  result = { error: error.constructor.name, message: error.message, status: error.status, body: error.error };
}
process.stdout.write(JSON.stringify(result));
