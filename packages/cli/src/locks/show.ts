import type { LocksOptions } from "../commands/locks.ts";
import { connect } from "../server.ts";
import { colorsOf, fit, print, printJson } from "../terminal.ts";
import { look } from "./look.ts";
import { counts, drawn, viewOf } from "./view.ts";

export async function showLocks({ url, blocked, json }: LocksOptions): Promise<void> {
  await using server = await connect({ url, application: "holdfast locks" });
  const seen = await look(server);
  if (json) {
    const { at, entries, chains } = seen;
    printJson({
      database: server.shown,
      at,
      ...(blocked ? {} : { holders: entries.filter(({ granted }) => granted) }),
      waiters: entries.filter(({ granted }) => !granted),
      chains,
    });
    return;
  }
  const colors = colorsOf(process.stdout);
  const { waiting, held } = viewOf(seen, colors, blocked ?? false);
  if (waiting.length + held.length === 0) {
    const nothing = blocked ? "Nobody waits for a lock" : "Nobody holds a lock or a lease";
    print(`${nothing} in ${server.shown}.`);
    return;
  }
  const width = process.stdout.isTTY ? process.stdout.columns : Infinity;
  const say = (lines: readonly string[]) => print(lines.join("\n"));
  print(fit(`${counts(seen)} in ${server.shown}`, width));
  if (waiting.length > 0)
    say(["", colors.bold("In the way, and who waits"), ...drawn(waiting, colors, width)]);
  if (held.length > 0)
    say([
      "",
      colors.bold(waiting.length > 0 ? "Held, and nobody waits" : "Held"),
      ...drawn(held, colors, width),
    ]);
}
