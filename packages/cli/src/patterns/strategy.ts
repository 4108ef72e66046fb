import { type Strategy, changeStrategy, strategyOf } from "holdfast";
import { print, printJson } from "../terminal.ts";
import { type ChangeOptions, actorOf, agreed } from "./change.ts";
import { type PlaceOptions, onServer } from "./place.ts";
import { quoted } from "./show.ts";

export async function show(options: PlaceOptions): Promise<void> {
  await onServer("strategy", options, async ({ hf }) => {
    const { strategy, changingTo } = await strategyOf(hf);
    if (options.json) return printJson({ strategy: strategy ?? null, changingTo: changingTo ?? null });
    if (strategy === undefined)
      return print(
        "Nothing is written down: nobody has taken a lock since `holdfast migrate`, or this user may not see it.",
      );
    print(`Locks of this database are ${quoted(strategy)}.`);
    if (changingTo !== undefined)
      print(
        `They are being changed to ${quoted(changingTo)}, and nobody gets one meanwhile. If that was stopped: \`holdfast strategy set ${quoted(changingTo)}\` goes on, \`holdfast strategy set ${quoted(strategy)}\` goes back.`,
      );
  });
}

export async function set(to: string, options: ChangeOptions & { readonly wait: number }): Promise<void> {
  await onServer("strategy", options, async (server) => {
    const { strategy, changingTo } = await strategyOf(server.hf);
    const done = (from: string | undefined, now: string, changed: boolean): void => {
      if (options.json) printJson({ from: from ?? null, to: now, changed });
      else print(`Locks are ${quoted(now)} ${changed ? "from now on" : "already"}.`);
    };
    if (strategy === to && changingTo === undefined) return done(strategy, to, false);
    const question = `Keep locks as ${quoted(to)}${strategy === undefined ? "" : `, and no longer as ${quoted(strategy)}`}? Nobody gets a lock for half a minute.`;
    if (!(await agreed(question, options))) return;
    const { wait, note } = options;
    const actor = await actorOf(server);
    const { from, to: now, changed } = await changeStrategy(server.hf, to as Strategy, { actor, note, wait });
    done(from, now, changed);
  });
}
