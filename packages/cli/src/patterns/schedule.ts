import { type RunInfo, runs, schedules } from "holdfast/schedule";
import { Failure } from "../failure.ts";
import { age, print, printJson } from "../terminal.ts";
import { type PlaceOptions, onServer } from "./place.ts";
import { cell, firstLine, printFacts, printTable, quoted, when } from "./show.ts";

function took({ startedAt, endedAt }: RunInfo): string {
  return endedAt === undefined ? "" : age(endedAt.getTime() - startedAt.getTime());
}

export async function list(options: PlaceOptions): Promise<void> {
  await onServer("schedule", options, async ({ hf }) => {
    const all = await schedules(hf);
    if (options.json) {
      printJson({ schedules: all });
      return;
    }
    if (all.length === 0) {
      print("There are no schedules yet: a schedule is made when it is first started.");
      return;
    }
    printTable(
      ["schedule", "last tick (UTC)", "open", "last run", "took", "error"],
      all.map(({ name, last, open, lastRun }) => [
        cell(name),
        when(last),
        open,
        lastRun?.state ?? "",
        lastRun ? took(lastRun) : "",
        cell(firstLine(lastRun?.error ?? "")),
      ]),
    );
  });
}

export async function show(name: string, options: PlaceOptions & { readonly limit: number }): Promise<void> {
  await onServer("schedule", options, async ({ hf }) => {
    const [info] = await schedules(hf, { names: [name] });
    if (!info) {
      const known = (await schedules(hf)).map((each) => quoted(each.name));
      throw new Failure(
        `There is no schedule ${quoted(name)}${known.length === 0 ? ": there are none yet." : `. There are ${known.slice(0, 20).join(", ")}${known.length > 20 ? " …" : "."}`}`,
      );
    }
    const found = await runs(hf, name, { limit: options.limit });
    if (options.json) {
      printJson({ schedule: info, runs: found });
      return;
    }
    printFacts({
      schedule: name,
      "last tick": `${when(info.last)} UTC`,
      "open runs": info.open,
      "last run": info.lastRun?.state ?? "none that is over",
    });
    if (found.length === 0) return;
    print();
    printTable(
      ["tick (UTC)", "state", "attempt", "started (UTC)", "took", "by", "error"],
      found.map((run) => [
        when(run.tick),
        run.manual ? `${run.state}, by hand` : run.state,
        run.attempt,
        when(run.startedAt),
        took(run),
        cell(run.holder),
        cell(firstLine(run.error ?? "")),
      ]),
      ["started (UTC)", "by"],
    );
  });
}
