import { type Exploration, explore } from "holdfast/testing";
import { command } from "../support.ts";
import * as scenarios from "./scenarios.ts";

export type Result = Readonly<Record<string, { readonly ok: boolean; readonly switches?: number }>>;

/** What `holdfast race examples/race/scenarios.ts` does. */
export async function main(url: string): Promise<Result> {
  const result: Record<string, Result[string]> = {};
  for (const [name, make] of Object.entries(scenarios)) {
    const scenario = await make({ url });
    try {
      result[name] = shown(await explore(name, scenario));
    } finally {
      await scenario.close();
    }
  }
  return result;
}

function shown({ ok, text, preemptions }: Exploration): Result[string] {
  console.log(text);
  return { ok, ...(preemptions === undefined ? {} : { switches: preemptions }) };
}

await command(import.meta.url, main, (result) =>
  Object.entries(result)
    .map(([name, { ok }]) => `${name}: ${ok ? "no race" : "a race"}`)
    .join("; "),
);
