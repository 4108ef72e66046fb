/** `--svg`: the schedule of each race as a picture of its own. */
import { join } from "node:path";
import { drawFile } from "./draw.ts";
import { type Outcome, kindOf } from "./outcome.ts";

/** By file: in a folder, by the names of the exports; or the first one as it was named, and the others beside it. */
export function schedules(path: string, outcomes: readonly Outcome[]): Record<string, string> {
  const races = outcomes.flatMap((outcome) => (outcome.status === "race" ? [outcome] : []));
  const name = (key: string) => key.replaceAll(/[^\w.-]+/g, "-");
  return Object.fromEntries(
    races.map(({ key, name: scenario, report }, i) => {
      const { isolation, turns = [], actors = [] } = report;
      const file = !path.endsWith(".svg")
        ? join(path, `${name(key)}.svg`)
        : i === 0
          ? path
          : path.replace(/\.svg$/, `-${name(key)}.svg`);
      const kind = [kindOf(report), ...(isolation ? [isolation.toUpperCase()] : [])].join(" · ");
      return [file, drawFile([`✗ ${scenario}`, kind], { turns, actors, width: 900 })];
    }),
  );
}
