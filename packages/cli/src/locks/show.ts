import { describe } from "../describe.ts";
import { Failure, exitCodes, serversOwn } from "../failure.ts";
import { remedyOfNoConnection } from "../no-connection.ts";
import { connect } from "../server.ts";
import { colorsOf, fit, note, print, printJson } from "../terminal.ts";
import { NoAnswer, within } from "../within.ts";
import { look } from "./look.ts";
import { type Line, counts, drawn, viewOf } from "./view.ts";

export interface LocksOptions {
  readonly url?: string;
  readonly schema?: string;
  readonly blocked?: true;
  readonly json?: true;
}

/** Of all questions together. */
const lookMs = 20_000;

export async function showLocks({ url, schema, blocked, json }: LocksOptions): Promise<void> {
  await using server = await connect({ url, schema, application: "holdfast locks", most: 1 });
  const seen = await within(lookMs, look(server)).catch(async (error: unknown) => {
    if (error instanceof NoAnswer) await server.reset();
    const remedy = remedyOfNoConnection(serversOwn(error));
    throw remedy === undefined
      ? error
      : new Failure(`Could not look at ${server.shown}: ${describe(error)}. ${remedy}`, { cause: error });
  });
  if (seen.blind) process.exitCode = exitCodes.failed;
  if (json) {
    const { at, entries, chains, notes } = seen;
    printJson({
      database: server.shown,
      at,
      ...(blocked ? {} : { holders: entries.filter(({ granted }) => granted) }),
      waiters: entries.filter(({ granted }) => !granted),
      chains,
      notes,
    });
    return;
  }
  for (const each of seen.notes) note(each);
  const colors = colorsOf(process.stdout);
  const { waiting, held } = viewOf(seen, colors, blocked ?? false);
  if (waiting.length + held.length === 0) {
    const nothing = blocked ? "Nobody waits for a lock" : "Nobody holds a lock or a lease";
    const known = seen.notes.length > 0 && !blocked ? " that can be seen" : "";
    if (!seen.blind) print(`${nothing}${known} in ${server.shown}.`);
    return;
  }
  const width = process.stdout.isTTY ? process.stdout.columns || 80 : Infinity;
  const say = (title: string, lines: readonly Line[]) => {
    if (lines.length === 0) return;
    const { head, lines: texts } = drawn(lines, colors, width);
    print(["", colors.bold(title), ...head, ...texts.map(({ text }) => text)].join("\n"));
  };
  print(fit(`${counts(seen)} in ${server.shown}`, width));
  say("In the way, and who waits", waiting);
  say(waiting.length > 0 ? "Held, and nobody waits" : "Held", held);
}
