/** In place of a model that costs money: the same prompt has the same answer, and some prompts fail. */
import { setTimeout as sleep } from "node:timers/promises";

export interface Answer {
  readonly text: string;
  /** What it did cost: those of the prompt, and those of the answer. */
  readonly tokens: number;
}

export type Model = (prompt: string, options: { maxTokens: number; signal: AbortSignal }) => Promise<Answer>;

/** One token per word, which is about right. */
export const tokensOf = (text: string): number => text.split(/\s+/).filter(Boolean).length;

export class ModelError extends Error {}

/** "broken …" fails each time, "flaky …" the first time that it is asked. */
export function fakeModel(): Model {
  const asked = new Set<string>();
  return async (prompt, { maxTokens, signal }) => {
    const first = !asked.has(prompt);
    asked.add(prompt);
    await sleep(5, undefined, { signal });
    if (prompt.startsWith("broken") || (prompt.startsWith("flaky") && first))
      throw new ModelError("The model is overloaded");
    const words = prompt.split(/\s+/).toReversed().slice(0, maxTokens);
    return { text: words.join(" "), tokens: tokensOf(prompt) + words.length };
  };
}
