import {
  type RunInfo,
  type ScheduleInfo,
  pauseSchedule,
  resumeSchedule,
  runs,
  schedules,
} from "holdfast/schedule";
import { Failure } from "../failure.ts";
import type { Server } from "../server.ts";
import { age, print, printJson } from "../terminal.ts";
import { type ChangeOptions, change } from "./change.ts";
import { type PlaceOptions, onServer } from "./place.ts";
import { cell, firstLine, printFacts, printTable, quoted, when } from "./show.ts";

function took({ startedAt, endedAt }: RunInfo): string {
  return endedAt === undefined ? "" : age(endedAt.getTime() - startedAt.getTime());
}

async function found({ hf }: Server, name: string): Promise<ScheduleInfo> {
  const [info] = await schedules(hf, { names: [name] });
  if (info) return info;
  const known = (await schedules(hf)).map((each) => quoted(each.name));
  throw new Failure(
    `There is no schedule ${quoted(name)}${known.length === 0 ? ": there are none yet." : `. There are ${known.slice(0, 20).join(", ")}${known.length > 20 ? " …" : "."}`}`,
  );
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
      ["schedule", "last tick (UTC)", "open", "last run", "took", "state", "error"],
      all.map(({ name, paused, last, open, lastRun }) => [
        cell(name),
        when(last),
        open,
        lastRun?.state ?? "",
        lastRun ? took(lastRun) : "",
        paused ? "paused" : "",
        cell(firstLine(lastRun?.error ?? "")),
      ]),
    );
  });
}

export async function show(name: string, options: PlaceOptions & { readonly limit: number }): Promise<void> {
  await onServer("schedule", options, async (server) => {
    const info = await found(server, name);
    const newest = await runs(server.hf, name, { limit: options.limit });
    if (options.json) {
      printJson({ schedule: info, runs: newest });
      return;
    }
    printFacts({
      schedule: name,
      state: info.paused ? "paused: no tick is begun" : "open",
      "last tick": `${when(info.last)} UTC`,
      "open runs": info.open,
      "last run": info.lastRun?.state ?? "none that is over",
    });
    if (newest.length === 0) return;
    print();
    printTable(
      ["tick (UTC)", "state", "attempt", "started (UTC)", "took", "by", "error"],
      newest.map((run) => [
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

export async function pause(name: string, paused: boolean, options: ChangeOptions): Promise<void> {
  await onServer("schedule", options, async (server) => {
    const info = await found(server, name);
    const word = paused ? "paused" : "open";
    if (info.paused === paused) {
      if (options.json) printJson({ schedule: name, paused, changed: false });
      else print(`Schedule ${quoted(name)} is ${word} already.`);
      return;
    }
    const done = await change(
      server,
      {
        question: paused
          ? `Pause schedule ${quoted(name)}? No process will begin a tick of it; what runs goes on.`
          : `Resume schedule ${quoted(name)}? Its \`catchUp\` says what becomes of the ticks that were due meanwhile.`,
        action: paused ? "schedule.pause" : "schedule.resume",
        target: ["schedule", name],
      },
      options,
      async () => {
        await (paused ? pauseSchedule : resumeSchedule)(server.hf, name);
        return { paused };
      },
    );
    if (!done) return;
    if (options.json) printJson({ schedule: name, paused, changed: true });
    else print(`Schedule ${quoted(name)} is ${word}.`);
  });
}
