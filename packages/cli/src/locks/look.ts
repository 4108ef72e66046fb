/** One look at who holds what: locks, leases, runs of schedules and workers of queues, as one list. */
import { type LockView, type Session, HoldfastError } from "holdfast";
import type { Row, Server } from "../server.ts";

export type LockKind = LockView["kind"] | "schedule" | "queue";

/** A lock or a lease that is held or waited for. */
export interface Entry extends Omit<LockView, "kind"> {
  readonly kind: LockKind;
  /** Until when it lasts if it is not renewed: of leases. */
  readonly until?: Date | undefined;
  /** The number of the lease, to refuse a late holder by. */
  readonly fence?: number | undefined;
}

/** A session that is in the way, what of its locks is waited for, and those who wait. */
export interface Knot {
  readonly session: Session;
  readonly holds: readonly Entry[];
  /** What it waits for itself; none at the root, unless they wait for each other in a circle. */
  readonly waits: readonly Entry[];
  readonly waiters: readonly Knot[];
}

export interface Look {
  readonly at: Date;
  readonly entries: readonly Entry[];
  readonly chains: readonly Knot[];
}

export async function look(server: Server): Promise<Look> {
  // One after the other: a look should not need more than one connection.
  const locks = await locksOf(server);
  const leases = await leasesOf(server);
  const patterns = await patternsOf(server);
  const at = new Date();
  const entries = merged([...locks, ...leases, ...patterns]);
  return { at, entries, chains: chains(entries) };
}

/** Files that were never migrated have no leases. */
async function orNone<T>(asking: Promise<readonly T[]>): Promise<readonly T[]> {
  try {
    return await asking;
  } catch (error) {
    if (error instanceof HoldfastError && error.code === "HF_SCHEMA_MISSING") return [];
    throw error;
  }
}

async function locksOf({ hf }: Server): Promise<Entry[]> {
  const asking = hf.inspect().then(({ holders, waiters }) => [...holders, ...waiters]);
  // Where a file is the database, leases are among them.
  return (await orNone(asking)).filter(({ kind }) => kind !== "lease");
}

async function leasesOf({ hf }: Server): Promise<Entry[]> {
  const leases = await orNone(hf.leases());
  return leases.map((lease): Entry => {
    const { name, holder, fence, mode, waiting, since, until } = lease;
    const before = leases.filter(
      (other) => other !== lease && other.name === name && (!other.waiting || other.fence < fence),
    );
    return {
      kind: "lease",
      name,
      mode,
      granted: !waiting,
      session: { id: holder, application: "", state: waiting ? "in line" : "holding", since },
      waitingMs: waiting ? Math.max(0, Date.now() - since.getTime()) : undefined,
      blockedBy: waiting ? [...new Set(before.map((other) => other.holder))] : [],
      until,
      fence,
    };
  });
}

/** Runs of schedules, and workers that have no session to show that they live. */
async function patternsOf({ kind, query }: Server): Promise<Entry[]> {
  if (kind !== "postgres") return [];
  const [there] = await query(`SELECT CASE WHEN has_schema_privilege(oid, 'USAGE') THEN
      has_table_privilege(to_regclass('holdfast.schedule_run'), 'SELECT') END AS runs,
    CASE WHEN has_schema_privilege(oid, 'USAGE') THEN has_table_privilege(to_regclass('holdfast.queue_worker'), 'SELECT')
      AND has_table_privilege(to_regclass('holdfast.queue'), 'SELECT') END AS workers
    FROM pg_namespace WHERE nspname = 'holdfast'`);
  const found: Row[] = [];
  if (there?.["runs"] === true)
    found.push(
      ...(await query(`SELECT 'schedule' AS kind, 'schedule ' || schedule AS name, holder, fence::float8 AS fence,
        started AS since, until, state FROM holdfast.schedule_run
        WHERE state = 'running' AND until > clock_timestamp() ORDER BY schedule, tick`)),
    );
  if (there?.["workers"] === true)
    found.push(
      ...(await query(`SELECT 'queue' AS kind, 'queue ' || q.name || ': worker ' || w.id AS name, coalesce(w.name, '') AS holder,
        NULL AS fence, w.since, w.beat + w.ttl * interval '1 millisecond' AS until, 'working' AS state
        FROM holdfast.queue_worker w JOIN holdfast.queue q ON q.id = w.queue
        WHERE w.lock IS NULL AND w.beat + w.ttl * interval '1 millisecond' > clock_timestamp() ORDER BY q.name, w.id`)),
    );
  return found.map((row) => ({
    kind: row["kind"] as LockKind,
    name: String(row["name"]),
    mode: "exclusive",
    granted: true,
    session: {
      id: String(row["holder"]),
      application: "",
      state: String(row["state"]),
      since: row["since"] as Date,
    },
    waitingMs: undefined,
    blockedBy: [],
    until: row["until"] as Date,
    fence: row["fence"] === null ? undefined : Number(row["fence"]),
  }));
}

/** One for each session and lock: InnoDB has several for a row and the gap before it. */
function merged(entries: readonly Entry[]): Entry[] {
  const byName = new Map<string, Entry>();
  for (const entry of entries) {
    const { session, kind, name, granted, fence } = entry;
    const id = JSON.stringify([session.id, kind, name, granted, fence]);
    const before = byName.get(id);
    if (!before) byName.set(id, entry);
    else
      byName.set(id, {
        ...before,
        mode: before.mode === entry.mode ? before.mode : `${before.mode}, ${entry.mode}`,
        blockedBy: [...new Set([...before.blockedBy, ...entry.blockedBy])],
        waitingMs: Math.max(before.waitingMs ?? 0, entry.waitingMs ?? 0),
      });
  }
  return [...byName.values()].toSorted(
    (a, b) =>
      order(a.name, b.name) || Number(b.granted) - Number(a.granted) || order(a.session.id, b.session.id),
  );
}

function order(a: string, b: string): number {
  return a < b ? -1 : a > b ? 1 : 0;
}

/** Trees of who is in the way of whom, from those who wait for nobody; a circle begins with any of its members. */
export function chains(entries: readonly Entry[]): Knot[] {
  const waits = entries.filter(({ granted }) => !granted);
  const waiting = new Set(waits.map(({ session }) => session.id));
  const inTheWay = new Set(waits.flatMap(({ blockedBy }) => blockedBy));
  const sessions = new Map(entries.map(({ session }) => [session.id, session]));
  const seen = new Set<string>();
  const knot = (id: string): Knot => {
    seen.add(id);
    const behind = waits.filter(({ blockedBy }) => blockedBy.includes(id));
    const names = new Set(behind.map(({ name }) => name));
    const next = [...new Set(behind.map(({ session }) => session.id))].filter((waiter) => !seen.has(waiter));
    // Marked before they are followed: one that waits for two of these is shown once, beside them.
    for (const waiter of next) seen.add(waiter);
    const held = entries.filter(
      ({ granted, session, name }) => granted && session.id === id && names.has(name),
    );
    return {
      session: sessions.get(id) ?? { id, application: "", state: "unknown", since: undefined },
      // A lock of a row is seen by those who wait for it only.
      holds:
        held.length > 0
          ? held
          : behind.filter((wait, i) => behind.findIndex((b) => b.name === wait.name) === i),
      waits: waits.filter(({ session }) => session.id === id),
      waiters: next.map(knot),
    };
  };
  const roots = [...inTheWay].filter((id) => !waiting.has(id)).map(knot);
  for (const id of inTheWay) if (!seen.has(id)) roots.push(knot(id));
  // Nobody knows for whom: MariaDB does not tell of every lock.
  for (const { session } of waits) if (!seen.has(session.id)) roots.push(knot(session.id));
  return roots;
}

/** The name without the number that it is a hash of. */
export function plainName(name: string): string {
  return name.replace(/ \((?:bigint -?\d+|int -?\d+,-?\d+)\)$/, "");
}
