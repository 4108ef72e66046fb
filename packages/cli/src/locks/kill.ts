/** Ends what a session does, or the session itself, and tells who could go on. */
import { readFileSync, statSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";
import type { KillOptions } from "../commands/kill.ts";
import { confirmed, declined } from "../confirm.ts";
import { Failure, exitCodes } from "../failure.ts";
import { keepJsonError } from "../json.ts";
import { type Server, connect, fileOf } from "../server.ts";
import { note, print, printJson } from "../terminal.ts";
import { type Entry, type Look, look, plainName } from "./look.ts";
import { type ServerSession, cancel, sessionOf, terminate } from "./sessions.ts";
import { shown } from "../text.ts";

export type Way = "cancel, then terminate" | "cancel" | "terminate";

/** What is known of a session before it is ended. */
export interface Target {
  readonly session: ServerSession;
  readonly holds: readonly Entry[];
  /** What it waits for itself. */
  readonly waitsFor: readonly Entry[];
  /** Those who wait for it, and those who wait for them. */
  readonly waiters: readonly Entry[];
}

export interface Killed {
  readonly session: string;
  /** `none`: it still holds what it held. */
  readonly done: "cancelled" | "terminated" | "none";
  /** Who has got what they waited for, or ended. */
  readonly through: readonly string[];
  readonly stillWaiting: readonly string[];
}

export async function targetOf(server: Server, seen: Look, id: string): Promise<Target | string> {
  if (!/^\d{1,10}$/.test(id))
    return `${shown(id)} is not the number of a session: holdfast locks shows them.`;
  const session = await sessionOf(server, id);
  if (!session) return `There is no session ${id} (any more).`;
  if (session.own) return `Session ${id} is this command's own.`;
  if (!session.client)
    return `Session ${id} is a worker of the server's (${shown(session.state)}), and nobody's connection.`;
  // As the list of locks has it: without the name of a lock.
  const known = seen.entries.find((entry) => entry.session.id === id)?.session;
  return {
    session: { ...session, application: known?.application ?? session.application },
    holds: seen.entries.filter((entry) => entry.granted && entry.session.id === id),
    waitsFor: seen.entries.filter((entry) => !entry.granted && entry.session.id === id),
    waiters: behind(seen, id),
  };
}

/** Everybody who waits for it, directly or not. */
function behind({ entries }: Look, id: string): Entry[] {
  const found = new Set<Entry>();
  const ids = new Set([id]);
  for (let size = -1; size < found.size;) {
    size = found.size;
    for (const entry of entries) {
      if (entry.granted || found.has(entry) || entry.session.id === id) continue;
      if (!entry.blockedBy.some((other) => ids.has(other))) continue;
      found.add(entry);
      ids.add(entry.session.id);
    }
  }
  return [...found];
}

export function introduce({ session, holds, waitsFor, waiters }: Target): string[] {
  const names = (entries: readonly Entry[]) =>
    [...new Set(entries.map(({ name }) => shown(plainName(name))))].join(", ");
  const who = [shown(session.application), shown(session.state)].filter((word) => word !== "").join(", ");
  const waits = waitsFor.length > 0 ? `, and waits for ${names(waitsFor)}` : "";
  const lines = [
    `Session ${session.id} (${who}) holds ${holds.length > 0 ? names(holds) : "no lock that is known"}${waits}.`,
  ];
  for (const { session: waiter, name } of waiters)
    lines.push(
      `  ${shown(waiter.id)} ${waiter.application ? `(${shown(waiter.application)}) ` : ""}waits for ${shown(plainName(name))}`,
    );
  if (!session.here)
    lines.push(
      `It is in ${session.database === undefined ? "no database" : `the database ${shown(session.database)}`}, not in this one.`,
    );
  return lines;
}

const lookMs = 150;
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

export async function end(
  server: Server,
  { session, waiters }: Target,
  way: Way,
  patienceMs: number,
  say: (text: string) => void,
): Promise<Killed> {
  const { id } = session;
  let done: Killed["done"] = "none";
  // Between two statements there is nothing to cancel.
  if (way === "cancel" || (way !== "terminate" && session.active)) {
    await cancel(server, id);
    say(`Session ${id}: cancelled its statement.`);
    if (await untilFree(server, id, patienceMs)) done = "cancelled";
    else if (way !== "cancel") say(`Session ${id}: holds on after ${patienceMs} ms, so it is terminated.`);
  }
  if (done === "none" && way !== "cancel") {
    await terminate(server, id);
    if (await untilFree(server, id, goneMs)) done = "terminated";
  }
  const after = await look(server);
  const waiting = new Set(behind(after, id).map(same));
  // The others may wait for whoever of them came first.
  const later = new Set(after.entries.filter(({ granted }) => !granted).map(same));
  const through = waiters.filter((wait) => !waiting.has(same(wait)) && !later.has(same(wait)));
  const still = waiters.filter((wait) => waiting.has(same(wait)) || later.has(same(wait)));
  const ids = (entries: readonly Entry[]) => [...new Set(entries.map((entry) => entry.session.id))];
  return { session: id, done, through: ids(through), stillWaiting: ids(still) };
}

function same({ session, name }: Entry): string {
  return JSON.stringify([session.id, plainName(name)]);
}

export function outcome({ session, done, through, stillWaiting }: Killed): string {
  const words =
    done === "none"
      ? `Session ${session} still holds what it held.`
      : `Session ${session} was ${done === "cancelled" ? "cancelled: its statement was enough" : "terminated"}.`;
  const got = through.length > 0 ? ` ${list(through)} could go on.` : "";
  const rest =
    stillWaiting.length > 0
      ? ` ${list(stillWaiting)} still ${stillWaiting.length === 1 ? "waits" : "wait"}.`
      : "";
  return `${words}${got}${rest}`;
}

function list(ids: readonly string[]): string {
  return ids.map(shown).join(", ");
}

export async function killSessions(ids: readonly string[], options: KillOptions): Promise<void> {
  await using server = await connect({
    url: options.url,
    application: `holdfast kill ${process.pid}`,
    most: 1,
  });
  if (server.kind === "sqlite") throw new Failure(await refusal(server));
  const way: Way = options.cancel ? "cancel" : options.terminate ? "terminate" : "cancel, then terminate";
  const seen = await look(server);
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
    const result = await end(server, target, way, options.patience, note);
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
async function refusal(server: Server): Promise<string> {
  const { entries } = await look(server);
  const holders = new Set(entries.filter(({ granted }) => granted).map(({ session }) => session.id));
  const pids = writers(fileOf(server.url));
  const known = pids.length > 0 ? `; its locks are held by process ${pids.join(", ")}` : "";
  const leases = [...holders].filter((id) => id !== "unknown").map(shown);
  const byLease = leases.length > 0 ? `; leases are held by ${leases.join(", ")} (host:process)` : "";
  return `SQLite has no sessions to end: a process has the file open${known}${byLease}. End that process, or wait until the lease runs out.`;
}

/** Linux lists locks of files with the process that has them. */
function writers(path: string): number[] {
  const inodes = new Set(
    [path, `${path}-shm`, `${path}-wal`].flatMap(
      (file) => statSync(file, { throwIfNoEntry: false })?.ino ?? [],
    ),
  );
  try {
    return [
      ...new Set(
        readFileSync("/proc/locks", "utf8")
          .split("\n")
          .flatMap((line) => {
            const [, , , mode, pid, file] = line.trim().split(/\s+/);
            return mode === "WRITE" && inodes.has(Number(file?.split(":")[2])) ? [Number(pid)] : [];
          }),
      ),
    ].filter((pid) => pid !== process.pid);
  } catch {
    return [];
  }
}
