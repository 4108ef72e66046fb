/** Ends what a session does, or the session itself, and tells who could go on. */
import { setTimeout as sleep } from "node:timers/promises";
import { confirmed, declined } from "../confirm.ts";
import { Failure, exitCodes } from "../failure.ts";
import { describe } from "../describe.ts";
import { described } from "../exec/record.ts";
import { keepJsonError } from "../json.ts";
import { recorded } from "../patterns/change.ts";
import { type Server, connect, fileOf } from "../server.ts";
import { age, note, print, printJson } from "../terminal.ts";
import { listed, shown, word } from "../text.ts";
import { withoutAddresses } from "../url.ts";
import { grantee } from "../user.ts";
import { behind } from "./chains.ts";
import { closedTables } from "./closed.ts";
import { writersOf } from "./file.ts";
import { type Entry, type Look, type Who, look, plainName } from "./look.ts";
import { leaveNote } from "./note.ts";
import { type ServerSession, cancel, sessionsOf, terminate } from "./sessions.ts";
import { described as whoIs, oneLine } from "./view.ts";

export interface KillOptions {
  readonly url?: string;
  readonly schema?: string;
  readonly cancel?: true;
  readonly terminate?: true;
  readonly patience: number;
  readonly watch: number;
  readonly yes?: true;
  readonly note?: string;
  readonly json?: true;
}

export type Way = "cancel, then terminate" | "cancel" | "terminate";

/** What is known of a session before it is ended. */
export interface Target {
  readonly session: ServerSession;
  readonly holds: readonly Entry[];
  /** It is `holdfast exec`. */
  readonly exec: Who["exec"];
  /** What it waits for itself. */
  readonly waitsFor: readonly Entry[];
  /** Those who wait for it, and those who wait for them. */
  readonly waiters: readonly Entry[];
  /** All who held or waited for anything then. */
  readonly known: ReadonlySet<string>;
}

export interface Killed {
  readonly session: string;
  /** `none`: it still holds what it held. */
  readonly done: "cancelled" | "terminated" | "none";
  /** Who has got what they waited for, or ended. */
  readonly through: readonly string[];
  readonly stillWaiting: readonly string[];
  /** Who has come meanwhile, from the same client, for what the session held: its transaction run again, or the next one. */
  readonly again: readonly Again[];
}

export interface Again {
  readonly session: string;
  readonly lock: string;
  readonly holds: boolean;
}

export async function targetOf(server: Server, seen: Look, id: string): Promise<Target | string> {
  const entry = seen.entries.find(({ session }) => session.id === id);
  if (entry?.kind === "lease")
    return `${shown(id)} holds a lease, which no session has: holdfast lease end ${word(entry.name)} takes it away.`;
  if (!/^\d{1,10}$/.test(id))
    return `${shown(withoutAddresses(id))} is not the number of a session: holdfast locks shows them.`;
  const known = entry?.session;
  const session = (await sessionsOf(server, [id])).get(id);
  if (!session)
    return known?.hidden
      ? `Session ${id} is another user's, which this one may not see, nor end: GRANT PROCESS, CONNECTION_ADMIN ON *.* TO ${await grantee(server)};`
      : `There is no session ${id} (any more).`;
  if (session.own) return `Session ${id} is this command's own.`;
  if (session.worker)
    return `Session ${id} is a worker of the server's (${shown(session.state)}), and nobody's connection.`;
  return {
    // As the list of locks has it: without the name of a lock.
    session: { ...session, application: known?.application ?? session.application },
    exec: known?.exec,
    holds: seen.entries.filter((each) => each.granted && each.session.id === id),
    waitsFor: seen.entries.filter((each) => !each.granted && each.session.id === id),
    waiters: behind(seen.entries, id),
    known: new Set(seen.entries.map((each) => each.session.id)),
  };
}

const namesOf = (entries: readonly Entry[]): string[] => [
  ...new Set(entries.map(({ name }) => shown(plainName(name)))),
];

/** Of those who wait, no more are named one by one. */
const mostWaiters = 20;

export function introduce({ session, exec, holds, waitsFor, waiters }: Target): string[] {
  const waits = waitsFor.length > 0 ? `, and waits for ${listed(namesOf(waitsFor))}` : "";
  // What others wait for is held by it, though a lock of a row is seen by those who wait only.
  const direct = waiters.filter(({ blockedBy }) => blockedBy.includes(session.id));
  const held = namesOf(holds.length > 0 ? holds : direct);
  const lines = [
    `Session ${session.id} (${whoIs(session)}) holds ${held.length > 0 ? listed(held) : "no lock that is known"}${waits}.`,
  ];
  if (exec)
    lines.push(
      `  it is holdfast exec${exec.run ? `, which runs ${shown(described(exec.run))} since ${age(exec.run.ageMs)}` : ""}: its end cuts the command off half-way, and those who follow it fail`,
    );
  else if (session.statement !== "")
    lines.push(`  ${session.active ? "it runs" : "it ran"} ${oneLine(session.statement, 200)}`);
  for (const { session: waiter, name } of waiters.slice(0, mostWaiters))
    lines.push(
      `  ${shown(waiter.id)} ${waiter.application ? `(${shown(waiter.application)}) ` : ""}waits for ${shown(plainName(name))}`,
    );
  if (waiters.length > mostWaiters) lines.push(`  and ${waiters.length - mostWaiters} more wait behind it`);
  if (!session.here)
    lines.push(
      `It is in ${session.database === undefined ? "no database" : `the database ${shown(session.database)}`}, not in this one.`,
    );
  return lines;
}

const lookMs = 150;

/** Somebody new, of the same program as far as it can be told, who has, or wants, what the session held. */
async function cameBack(server: Server, target: Target, ms: number): Promise<Again[]> {
  const { session, holds, known } = target;
  const names = new Set(namesOf(holds));
  if (names.size === 0 || ms === 0) return [];
  const same = (who: Who) =>
    !known.has(who.id) &&
    who.user === session.user &&
    who.client === session.client &&
    (who.application === session.application || server.kind !== "postgres");
  const until = performance.now() + ms;
  for (;;) {
    const { entries } = await look(server);
    const found = entries
      .filter((entry) => names.has(shown(plainName(entry.name))) && same(entry.session))
      .map((entry) => ({ session: entry.session.id, lock: plainName(entry.name), holds: entry.granted }));
    if (found.length > 0 || performance.now() >= until) return found;
    await sleep(lookMs);
  }
}

/** How long the note stays at least: the client has to notice, and to ask. */
const noteMs = 3000;

/** How long a session that was terminated may take to be gone. */
const goneMs = 5000;

/** The session waits for nothing, holds nothing, and nobody waits for it. */
function isFree({ entries }: Look, id: string): boolean {
  return !entries.some(({ session, blockedBy }) => session.id === id || blockedBy.includes(id));
}

async function untilFree(server: Server, id: string, ms: number): Promise<boolean> {
  const until = performance.now() + ms;
  for (;;) {
    if (isFree(await look(server), id)) return true;
    if (performance.now() >= until) return false;
    await sleep(Math.min(lookMs, Math.max(1, until - performance.now())));
  }
}

/** What is told while it goes on, and if it could not be written down. */
export interface Voice {
  say(text: string): void;
  warn(text: string): void;
}

/** Ends it, and writes down who did so to whom. */
export async function end(
  server: Server,
  target: Target,
  options: {
    readonly way: Way;
    readonly patience: number;
    /** How long to look whether what it held is taken again. */
    readonly watch: number;
    readonly note?: string;
  },
  { say, warn }: Voice,
): Promise<Killed> {
  const { session, holds, waiters } = target;
  const { way } = options;
  const { id, user, client, application, state, statement } = session;
  const what = {
    action: "kill",
    target: ["session", id],
    details: {
      way,
      user,
      client,
      application,
      state,
      statement: oneLine(statement, 200),
      holds: namesOf(holds),
      waiting: new Set(waiters.map((entry) => entry.session.id)).size,
    },
  };
  const work = () => ended(server, target, options, say);
  if ((await closedTables(server, ["audit"])).length > 0) {
    warn("This is not written down in an audit: somebody has locked it, or waits to.");
    return work();
  }
  return recorded(server, what, { note: options.note, warn, anyway: true }, work);
}

async function ended(
  server: Server,
  target: Target,
  {
    way,
    patience: patienceMs,
    watch,
  }: { readonly way: Way; readonly patience: number; readonly watch: number },
  say: (text: string) => void,
): Promise<Killed> {
  const { session, waiters } = target;
  const { id } = session;
  let done: Killed["done"] = "none";
  let again: Again[] = [];
  // Between two statements there is nothing to cancel. Of what is hidden, it is not known.
  if (way === "cancel" || (way !== "terminate" && (session.active || session.hidden))) {
    await cancel(server, id);
    say(`Session ${id}: cancelled its statement.`);
    if (await untilFree(server, id, patienceMs)) done = "cancelled";
    else if (way !== "cancel") say(`Session ${id}: holds on after ${patienceMs} ms, so it is terminated.`);
  }
  if (done === "none" && way !== "cancel") {
    const note = await leaveNote(server, id).catch((error: unknown) => {
      say(
        `Session ${id}: its transaction cannot be told that this is meant (${shown(describe(error))}), and may run again.`,
      );
      return undefined;
    });
    try {
      await terminate(server, id);
      if (await untilFree(server, id, goneMs)) done = "terminated";
      if (done === "terminated") {
        const until = performance.now() + noteMs;
        again = await cameBack(server, target, watch);
        if (again.length === 0 && note) await sleep(Math.max(0, until - performance.now()));
      }
    } finally {
      await note?.[Symbol.asyncDispose]();
    }
  }
  const after = await look(server);
  const waiting = new Set(behind(after.entries, id).map(same));
  // The others may wait for whoever of them came first.
  const later = new Set(after.entries.filter(({ granted }) => !granted).map(same));
  const through = waiters.filter((wait) => !waiting.has(same(wait)) && !later.has(same(wait)));
  const still = waiters.filter((wait) => waiting.has(same(wait)) || later.has(same(wait)));
  const ids = (entries: readonly Entry[]) => [...new Set(entries.map((entry) => entry.session.id))];
  return { session: id, done, through: ids(through), stillWaiting: ids(still), again };
}

function same({ session, name }: Entry): string {
  return JSON.stringify([session.id, plainName(name)]);
}

export function outcome({ session, done, through, stillWaiting, again }: Killed): string {
  const words =
    done === "none"
      ? `Session ${session} still holds what it held.`
      : `Session ${session} was ${done === "cancelled" ? "cancelled: its statement was enough" : "terminated"}.`;
  const got = through.length > 0 ? ` ${list(through)} could go on.` : "";
  const rest =
    stillWaiting.length > 0
      ? ` ${list(stillWaiting)} still ${stillWaiting.length === 1 ? "waits" : "wait"}.`
      : "";
  const back = again.map(
    ({ session: id, lock, holds }) =>
      ` ${shown(lock)} did not stay free: session ${shown(id)}, of the same client, ${holds ? "holds" : "waits for"} it since. It is the same work run again, or the next: stop the program that does it.`,
  );
  const unknown =
    done === "terminated" && again.length === 0
      ? " If its client has not noticed yet (a frozen process, a pool without a free connection), it may run again."
      : "";
  return `${words}${got}${rest}${back.slice(0, 1).join("")}${unknown}`;
}

function list(ids: readonly string[]): string {
  return ids.map(shown).join(", ");
}

export async function killSessions(ids: readonly string[], options: KillOptions): Promise<void> {
  await using server = await connect({
    url: options.url,
    schema: options.schema,
    application: `holdfast kill ${process.pid}`,
    most: 1,
  });
  if (server.kind === "sqlite") throw new Failure(await refusal(server));
  const way: Way = options.cancel ? "cancel" : options.terminate ? "terminate" : "cancel, then terminate";
  const seen = await look(server);
  for (const each of seen.notes) note(each);
  const targets: Target[] = [];
  for (const id of new Set(ids)) {
    const target = await targetOf(server, seen, id);
    if (typeof target === "string") complainOf(target);
    else targets.push(target);
  }
  for (const line of targets.flatMap(introduce)) note(line);
  if (targets.length === 0) return;
  const which =
    targets.length === 1 ? `session ${targets[0]?.session.id}` : `these ${targets.length} sessions`;
  const verb = way === "cancel" ? `Cancel what ${which} does?` : `End ${which}?`;
  if (!(await confirmed(verb, options.yes))) {
    declined(options.json);
    return;
  }
  const killed: Killed[] = [];
  for (const target of targets) {
    const result = await end(server, target, { ...options, way }, { say: note, warn: note });
    killed.push(result);
    if (!options.json) print(outcome(result));
    if (result.done === "none") process.exitCode ||= exitCodes.no;
  }
  if (options.json) printJson({ sessions: killed });
}

function complainOf(text: string): void {
  process.stderr.write(`holdfast: ${text}\n`);
  process.exitCode = exitCodes.failed;
  keepJsonError({ message: text, exitCode: exitCodes.failed });
}

/** A file has no server that could end anybody. */
export async function refusal(server: Server): Promise<string> {
  const writers = writersOf(fileOf(server.url)).map(
    ({ pid, command }) => `${pid}${command === "" ? "" : ` (${shown(command)})`}`,
  );
  const known = writers.length > 0 ? `: process ${writers.join(", ")} writes to it` : "";
  const { entries } = await look(server);
  const leases = [
    ...new Set(entries.filter(({ kind }) => kind === "lease").map(({ session }) => session.id)),
  ];
  const byLease =
    leases.length > 0
      ? `; leases are held by ${listed(leases.map(shown))} (host:process): holdfast lease end takes one away`
      : "";
  return `SQLite has no sessions to end, but processes that have the file open${known}${byLease}. End that process, or wait.`;
}
