/**
 * Who is in everybody's way at this moment. Only the root of a chain is worth ending: whoever else waits is a victim of
 * it, and so is an ALTER that waits for the last transaction and keeps everybody who came later waiting behind itself.
 */
import { type Knot, behind } from "../locks/chains.ts";
import { type Entry, type Look, type Who, lookAtLocks, plainName } from "../locks/look.ts";
import { age } from "../terminal.ts";
import { listed, plural } from "../text.ts";
import { type Check, type Finding, lostWith, short } from "./check.ts";
import type { Patient } from "./patient.ts";

/** Somebody who may be in the way, where the server does not tell who is. */
export interface Suspect {
  readonly id: string;
  /** "session 7 of app, idle for 12 s". */
  readonly who: string;
}

/** What a kind of server knows besides. */
export interface Ways<P extends Patient> {
  /** How a session is ended in SQL. */
  end(id: string): string;
  /** Transactions that were open before, and wait for nobody: of those who wait for so many milliseconds. */
  suspects?(patient: P, waitingMs: number): Promise<readonly Suspect[]>;
  /** What would make the server tell. */
  tell?(patient: P): string;
}

const looks = new WeakMap<object, Promise<Look>>();

/** One look for all checks: what one of them tells of, the others leave out. */
export function locksOf(patient: Patient): Promise<Look> {
  let found = looks.get(patient);
  if (!found) looks.set(patient, (found = lookAtLocks(patient.server)));
  return found;
}

const leastMs = 1000;

/**
 * Sessions that others have been waiting for, for more than a second, and those who wait: neither is idle, or slow, for a reason of
 * its own. And those of `holdfast exec`, which are idle on purpose, and must not be ended.
 */
export async function involved(patient: Patient): Promise<ReadonlySet<string>> {
  const { entries } = await locksOf(patient).catch(() => ({ entries: [] }));
  const waits = entries.filter((entry) => !entry.granted && (entry.waitingMs ?? leastMs) >= leastMs);
  const execs = entries.filter(({ session }) => session.exec);
  return new Set([
    ...waits.flatMap(({ session, blockedBy }) => [session.id, ...blockedBy]),
    ...execs.map(({ session }) => session.id),
  ]);
}

const why =
  "Nobody behind it goes on before it ends: a forgotten COMMIT, a call over the network inside of a transaction, a frozen process. Ending one of those who wait frees nobody, or only those behind it.";

export function waitsCheck<P extends Patient>(ways: Ways<P>): Check<P> {
  return {
    id: "waits",
    title: "a session is in the way of others, who have been waiting for more than a second",
    async run(patient): Promise<Finding[]> {
      const { entries, chains, at } = await locksOf(patient);
      const crowds = chains
        .map((root) => ({ root, waits: waitsBehind(entries, root) }))
        .filter(({ waits }) =>
          waits.some(({ waitingMs, session }) => (waitingMs ?? leastMs) >= leastMs && !session.elsewhere),
        )
        .toSorted((a, b) => sessionsOf(b.waits).length - sessionsOf(a.waits).length);
      const found: Finding[] = [];
      for (const { root, waits } of crowds) {
        const others = crowds
          .filter((crowd) => crowd.root !== root)
          .flatMap((crowd) => sessionsOf(crowd.waits));
        const free = sessionsOf(waits).filter((id) => !others.includes(id)).length;
        found.push(await told(patient, ways, { root, waits, entries, free, at }));
      }
      return found;
    },
  };
}

interface Crowd {
  readonly root: Knot;
  /** Of everybody behind it, and of its own if it waits too. */
  readonly waits: readonly Entry[];
  readonly entries: readonly Entry[];
  /** How many wait for nobody else. */
  readonly free: number;
  readonly at: Date;
}

function waitsBehind(entries: readonly Entry[], { session, waits }: Knot): Entry[] {
  return [...waits, ...behind(entries, session.id)];
}

function sessionsOf(entries: readonly Entry[]): string[] {
  return [...new Set(entries.map(({ session }) => session.id))];
}

async function told<P extends Patient>(patient: P, ways: Ways<P>, crowd: Crowd): Promise<Finding> {
  const { root, waits } = crowd;
  const waitingMs = Math.max(...waits.map((entry) => entry.waitingMs ?? 0));
  if (root.session.exec) return running(crowd, root.session.exec, waitingMs);
  if (root.session.worker)
    return unending(crowd, "a worker of the server's, ", worker(root.session), waitingMs);
  const lost = lostWith(root.session.application, root.session.statement);
  if (lost !== undefined && root.session.state === "active") return unending(crowd, "", lost, waitingMs);
  if (root.waits.length === 0)
    return rooted(ways, crowd, who(root.session, crowd.at), root.session.id, waitingMs);
  if (root.waits.some(({ blockedBy }) => blockedBy.length > 0)) return circle(ways, crowd);
  const suspects = (await ways.suspects?.(patient, waitingMs)) ?? [];
  const [one, ...more] = suspects.filter(({ id }) => !sessionsOf(waits).includes(id));
  if (one && more.length === 0)
    return rooted(
      ways,
      crowd,
      `${one.who}, the only transaction that was open before, probably`,
      one.id,
      waitingMs,
    );
  const [first] = root.waits;
  const names = [...(one ? [one] : []), ...more].map((each) => each.who);
  return {
    severity: "error",
    what: `${who(root.session, crowd.at)} waits for ${nameOf(first)} since ${age(waitingMs)}${others(waits, root)}, and the server does not tell for whom${names.length > 0 ? `. In a transaction since before: ${listed(names)}` : ""}`,
    why,
    fix: ways.tell?.(patient) ?? "holdfast locks",
  };
}

/** It holds its locks for as long as a command runs, which is what those who wait have asked for. */
function running({ root, waits }: Crowd, { run }: NonNullable<Who["exec"]>, waitingMs: number): Finding {
  const { id, client } = root.session;
  const held = listed([...new Set(root.holds.map(nameOf))]);
  const what = run
    ? `\`${run.command}\` since ${age(run.ageMs)} on ${run.host} (process ${run.process}, session ${id})`
    : `a command (session ${id}${client === "" ? "" : `, from ${client}`})`;
  return {
    severity: "hint",
    what: `holdfast exec is running ${what}; ${plural(sessionsOf(waits).length, "session waits", "sessions wait")} for its lock (${held}), for ${age(waitingMs)}`,
    why: "They wait until the command has ended, as they are meant to. To end the session would cut the command off half-way, and those who follow it would fail.",
    fix: run
      ? `Wait for it; or, on ${run.host}: kill ${run.process}   # ends the command by a signal, and those who follow fail`
      : "Wait for it; or end its holdfast exec by a signal, where it runs.",
  };
}

const isVacuum = ({ statement }: Who): boolean => /to prevent wraparound/.test(statement);

function worker(session: Who): string {
  return isVacuum(session)
    ? "An autovacuum that prevents wraparound does not give way, and one that is ended is started again at once: the server would stop taking writes without it. Whoever wants the whole table waits for its end, and everybody who comes later waits behind."
    : "A worker of the server's is nobody's connection: what it does is begun again, or something else relies on it. Whoever waits for it can be ended instead.";
}

/** One that had better come to its end, as autovacuum does and a backup. Who waits for it can be ended, and then those behind can go on. */
function unending(
  { root, waits, entries, at }: Crowd,
  kind: string,
  why: string,
  waitingMs: number,
): Finding {
  const direct = sessionsOf(waits.filter(({ blockedBy }) => blockedBy.includes(root.session.id)));
  const gates = direct
    .map((id) => ({ id, behind: sessionsOf(behind(entries, id)).length }))
    .toSorted((a, b) => b.behind - a.behind);
  const [gate = { id: "", behind: 0 }] = gates;
  const wants = waits.find(({ session }) => session.id === gate.id)?.session.statement ?? "";
  const { statement } = root.session;
  const then =
    kind === "" ? ", when it has ended" : isVacuum(root.session) ? ", when the vacuum has ended" : "";
  return {
    severity: "error",
    what: `session ${gate.id} (${short(wants, 50) || "for the whole table"}) waits for ${kind}${who(root.session, at)}, for ${age(waitingMs)}${statement === "" ? "" : `: ${short(statement, 120)}`}${gate.behind > 0 ? `. ${plural(gate.behind, "session stands", "sessions stand")} behind session ${gate.id}` : ""}`,
    why,
    fix: `holdfast kill ${gate.id} --cancel   # ${gate.behind > 0 ? `frees ${plural(gate.behind, "session")}` : "nobody is behind it yet"}; do it again with a short lock_timeout${then}`,
  };
}

function others(waits: readonly Entry[], { session }: Knot): string {
  const n = sessionsOf(waits).filter((id) => id !== session.id).length;
  return n === 0 ? "" : `, with ${plural(n, "session")} behind it`;
}

function rooted<P extends Patient>(
  ways: Ways<P>,
  { root, waits, entries, free }: Crowd,
  description: string,
  id: string,
  waitingMs: number,
): Finding {
  const all = sessionsOf(waits).length;
  const held = [...new Set(root.holds.map(nameOf))];
  const holds = held.length === 0 ? "" : ` (${listed(held)})`;
  const { statement } = root.session;
  const ran =
    statement === "" || root.session.id !== id
      ? ""
      : `; it ${/^active|ing$/i.test(root.session.state) ? "runs" : "ran"} ${short(statement)}`;
  const prepared = id.startsWith("prepared ");
  const freed =
    free === all
      ? plural(all, "session")
      : `${free} of ${plural(all, "session")}, the others wait for somebody else too`;
  return {
    severity: "error",
    what: `${description} is in the way of ${plural(all, "session")}${holds}, for ${age(waitingMs)}${ran}${middle(waits, entries)}`,
    why,
    fix: prepared
      ? "holdfast doctor --only prepared-transactions   # how to end it"
      : `holdfast kill ${id}   # frees ${freed}; in SQL: ${ways.end(id)}`,
  };
}

/** Who wants a whole table keeps everybody waiting who comes after, though it has nothing yet. */
function middle(waits: readonly Entry[], entries: readonly Entry[]): string {
  const gates = waits
    .filter(({ kind, granted }) => kind === "table" && !granted)
    .map((entry) => ({ entry, n: sessionsOf(behind(entries, entry.session.id)).length }))
    .filter(({ n }) => n > 0);
  const [gate] = gates.toSorted((a, b) => b.n - a.n);
  if (!gate) return "";
  const { id, statement } = gate.entry.session;
  return `. ${plural(gate.n, "of them stands", "of them stand")} behind session ${id}, which waits too (${short(statement, 50) || "for the whole table"}): holdfast kill ${id} --cancel lets these pass before it`;
}

function circle<P extends Patient>(ways: Ways<P>, { root, waits, at }: Crowd): Finding {
  const ids = sessionsOf(waits);
  const { id } = root.session;
  return {
    severity: "error",
    what: `sessions ${listed(ids)} wait for each other: ${who(root.session, at)} waits for ${listed([...new Set(root.waits.map(nameOf))])}`,
    why: "A cycle of locks of different kinds is seen by nobody: it lasts until one of them has waited long enough.",
    fix: `holdfast kill ${id}   # any of them; in SQL: ${ways.end(id)}`,
  };
}

function nameOf(entry: Entry | undefined): string {
  return entry === undefined ? "a lock" : plainName(entry.name);
}

/** "session 4711 of app (api, 10.0.0.5, idle in transaction, 42 s in its transaction)". */
function who({ id, user, application, client, state, since, hidden }: Who, at: Date): string {
  if (id === "prepared transaction") return "a prepared transaction (two-phase commit)";
  if (id.startsWith("prepared ")) return `the prepared transaction ${id.slice("prepared ".length)}`;
  const words = [
    application,
    client,
    hidden ? "what it does is hidden from this user" : state,
    since ? `${age(at.getTime() - since.getTime())} in its transaction` : "",
  ].filter((word) => word !== "");
  return `session ${id}${user === "" ? "" : ` of ${user}`}${words.length > 0 ? ` (${words.join(", ")})` : ""}`;
}
