// Drives a running service through the generated client and prints what it saw as JSON: node drive.js URL KEY

import { batch, chatCompletions, completions, generate, info, livez, model, models, readyz } from "./client";
import type { BatchResponse, ChatMessage, CompletionRequest, ErrorObject, GenerateResponse, Timings } from "./client";
import { client } from "./client/client.gen";
import type { components } from "./types";

type Line = components["schemas"]["BatchLine"];

const seen = (status: number, error: ErrorObject) => ({ status, code: error.code, param: error.param });
const textOf = (answer: GenerateResponse): string | undefined => answer.outputs[0]?.text;

function rows(answer: BatchResponse) {
  return answer.results.map((row) =>
    row.error ? seen(row.status, row.error) : { status: row.status, text: row.response && textOf(row.response) },
  );
}

async function lines(url: string, key: string) {
  const answer = await fetch(`${url}/batch`, {
    method: "POST",
    headers: { accept: "application/x-ndjson", "content-type": "application/json", authorization: `Bearer ${key}` },
    body: JSON.stringify({ requests: [{ prompt: "a" }, { prompt: "b" }] }),
  });
  const all = (await answer.text()).split("\n").filter(Boolean).map((line) => JSON.parse(line) as Line);
  return {
    rows: all.flatMap((line) => ("index" in line ? [line.index] : [])).sort(),
    succeeded: all.flatMap((line) => ("counts" in line ? [line.counts.succeeded] : []))[0],
  };
}

const sumOf = (times: Timings): number =>
  times.resolve_ms + times.window_wait_ms + (times.submit_ms ?? 0) + (times.engine_queue_ms ?? 0) +
  (times.prefill_ms ?? 0) + (times.decode_ms ?? 0) + (times.window_tail_ms ?? 0);

async function completed(prompt: CompletionRequest["prompt"], max_tokens: number) {
  return (await completions({ body: { prompt, max_tokens }, throwOnError: true })).data;
}

async function said(content: ChatMessage["content"]): Promise<string | null | undefined> {
  const body = { messages: [{ role: "user", content }], max_completion_tokens: 21 };
  return (await chatCompletions({ body, throwOnError: true })).data.choices[0]?.message.content;
}

async function openai() {
  const listed = (await models({ throwOnError: true })).data.data;
  const found = (await model({ path: { model: listed[0]?.id ?? "" }, throwOnError: true })).data;
  const answers = {
    text: await completed("hi", 2),
    list: await completed(["one", "two"], 3),
    ids: await completed([97, 98], 2),
    lists_of_ids: await completed([[97, 98], [99, 100]], 2),
  };
  const texts = Object.entries(answers).map(([name, answer]) => [name, answer.choices.map((choice) => choice.text)]);
  const metrics = answers.list.metrics;
  const refused = await completions({ body: { prompt: "x", echo: true, top_k: -2 } });
  return {
    models: listed.map((one) => one.id),
    model: found.id,
    texts: Object.fromEntries(texts),
    chats: [await said("abc"), await said([{ type: "text", text: "abc" }])],
    e2e_ms: metrics.timings.e2e_ms,
    sum_ms: sumOf(metrics.timings),
    requests: metrics.requests?.length,
    error: refused.error && seen(refused.response.status, refused.error.error),
  };
}

async function main(url: string, key: string): Promise<void> {
  client.setConfig({ baseUrl: url, auth: () => key });
  const about = (await info({ throwOnError: true })).data;
  const prompt = (await generate({ body: { prompt: "hello ", max_tokens: 9 }, throwOnError: true })).data;
  const messages = [{ role: "user", content: "abc" }];
  const chat = (await generate({ body: { messages, max_tokens: 21 }, throwOnError: true })).data;
  const requests = [{ prompt: "one" }, { prompt: "x", top_p: 7 }, { prompt: "BOOM" }, { prompt: "two" }];
  const many = (await batch({ body: { requests, defaults: { max_tokens: 3 } }, throwOnError: true })).data;
  const refused = await generate({ body: { prompt: "x", temperature: -1 } });
  const stranger = await info({ auth: () => "wrong" });
  const report = {
    livez: (await livez({ throwOnError: true })).data.status,
    readyz: (await readyz({ throwOnError: true })).data.status,
    info: { kind: about.backend.kind, max_model_len: about.limits.max_model_len },
    prompt: textOf(prompt),
    messages: textOf(chat),
    e2e_ms: prompt.timings.e2e_ms,
    rows: rows(many),
    counts: many.counts,
    error: refused.error && seen(refused.response.status, refused.error.error),
    wrong_key: stranger.error && seen(stranger.response.status, stranger.error.error),
    lines: await lines(url, key),
    openai: await openai(),
  };
  console.log(JSON.stringify(report));
}

void main(process.argv[2] ?? "", process.argv[3] ?? "");
