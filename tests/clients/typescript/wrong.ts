// Each line that ends with `wrong` is a type error, and no other line is: the compiler refuses what the service would.

import type { BatchRequest, ChatCompletionRequest, Completion, GenerateRequest, GenerateResponse } from "./client";
import type { CompletionRequest } from "./client";
import type { components } from "./types";

export const good: GenerateRequest = { prompt: "x", max_tokens: 5, stop: ["\n"], logit_bias: { "5": 1 } };
export const unknownField: GenerateRequest = { prompt: "x", max_token: 5 }; // wrong
export const wrongType: GenerateRequest = { prompt: "x", max_tokens: "5" }; // wrong
export const wrongBias: GenerateRequest = { prompt: "x", logit_bias: { "5": "much" } }; // wrong
export const noRequests: BatchRequest = { defaults: { max_tokens: 5 } }; // wrong
export const promptInDefaults: BatchRequest = { requests: [good], defaults: { prompt: "x" } }; // wrong
export const noRole: components["schemas"]["ChatMessage"] = { content: "x" }; // wrong
export const tokens = (answer: GenerateResponse): number => answer.usage.tokens; // wrong
export const maybeNull = (answer: GenerateResponse): number => answer.timings.prefill_ms; // wrong
export const reason = (answer: GenerateResponse): boolean => answer.outputs[0]?.finish_reason === "abort"; // wrong

export const ids: CompletionRequest = { prompt: [[1, 2], [3]], max_tokens: 0, echo: true, logprobs: 1 };
export const noPrompt: CompletionRequest = { max_tokens: 5 }; // wrong
export const mixed: CompletionRequest = { prompt: ["x", 1] }; // wrong
export const parts: ChatCompletionRequest = { messages: [{ role: "user", content: [{ type: "text", text: "x" }] }] };
export const effort: ChatCompletionRequest = { messages: [], reasoning_effort: "endless" }; // wrong
export const whole = (answer: Completion): number => answer.metrics.timings.e2e_ms;
export const maybe = (answer: Completion): number => answer.metrics.requests.length; // wrong
