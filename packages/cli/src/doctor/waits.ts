/**
 * Who is in everybody's way at this moment. Only the root of a chain is worth ending: whoever else waits is a victim of
 * it, and so is an ALTER that waits for the last transaction and keeps everybody who came later waiting behind itself.
 */
import { type Knot, behind } from "../locks/chains.ts";
import { type Entry, type Look, type Who, lookAtLocks, plainName } from "../locks/look.ts";
import { age } from "../terminal.ts";
import { listed, plural } from "../text.ts";
import { type Check, type Finding, short } from "./check.ts";
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
  readonly tell?: string;
}

const looks = new WeakMap<object, Promise<Look>>();

/** One look for all checks: what one of them tells of, the others leave out. */
export function locksOf(patient: Patient): Promise<Look> {
  let found = looks.get(patient);
  if (!found) looks.set(patient, (found = lookAtLocks(patient.server)));
  return found;
}

const leastMs = 1000;

/** Sessions that others have been waiting for, for more than a second; and those who wait. Neither is idle, or slow, for a reason of its own. */
export async function involved(patient: Patient): Promise<ReadonlySet<string>> {
  const { entries } = await locksOf(patient).catch(() => ({ entries: [] }));
  const waits = entries.filter((entry) => !entry.granted && (entry.waitingMs ?? leastMs) >= leastMs);
  return new Set(waits.flatMap(({ session, blockedBy }) => [session.id, ...blockedBy]));
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
    fix: ways.tell ?? "holdfast locks",
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
  if (id.startsWith("prepared ")) return `the prepared transaction ${id.slice("prepared ".length)}`;
  const words = [
    application,
    client,
    hidden ? "what it does is hidden from this user" : state,
    since ? `${age(at.getTime() - since.getTime())} in its transaction` : "",
  ].filter((word) => word !== "");
  return `session ${id}${user === "" ? "" : ` of ${user}`}${words.length > 0 ? ` (${words.join(", ")})` : ""}`;
}
