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
    const { strategy } = await strategyOf(server.hf);
    const question = `Keep locks as ${quoted(to)}${strategy === undefined ? "" : `, and no longer as ${quoted(strategy)}`}? Nobody gets a lock for half a minute.`;
    if (!(await agreed(question, options))) return;
    const { wait, note } = options;
    const actor = await actorOf(server);
    const done = await changeStrategy(server.hf, to as Strategy, { actor, note, wait });
    if (options.json) printJson({ from: done.from ?? null, to: done.to, changed: done.changed });
    else
      print(
        done.changed ? `Locks are ${quoted(done.to)} from now on.` : `Locks are ${quoted(done.to)} already.`,
      );
  });
}
