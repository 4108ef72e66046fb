/** One look at who holds what: locks, leases, runs of schedules and workers of queues, as one list. */
import { type LockView, type Session, HoldfastError } from "holdfast";
import { describe } from "../describe.ts";
import { type ExecRun, described, unended } from "../exec/record.ts";
import { type Row, type Server, fileOf, schemaIn } from "../server.ts";
import { shown } from "../text.ts";
import { grantee, isDenied } from "../user.ts";
import { within } from "../within.ts";
import { type Knot, chains } from "./chains.ts";
import { closedTables } from "./closed.ts";
import { writersOf } from "./file.ts";
import type { Entry, LockKind, Who } from "./entry.ts";
import { type Sessions, hides, sessionsOf } from "./sessions.ts";

export type { Entry, LockKind, Who } from "./entry.ts";

export interface Look {
  readonly at: Date;
  readonly entries: readonly Entry[];
  readonly chains: readonly Knot[];
  /** What this user may not see, and the right that is missing. */
  readonly notes: readonly string[];
  /** Not even that there are locks may be seen. */
  readonly blind: boolean;
}

type Bare = Omit<Entry, "session"> & { readonly session: Session };

export async function look(server: Server): Promise<Look> {
  const notes: string[] = [];
  // One after the other: a look must not need more than one connection. Who waits for whom comes first.
  const locks = await allowed(locksOf(server), () => refusedLocks(server), notes);
  const sessions = await sessionsIn(server, locks ?? []);
  const others = await within(othersMs, othersOf(server, notes)).catch((error: unknown) => {
    // Locks are what this is about.
    notes.push(`Leases, schedules and queues could not be read: ${shown(describe(error))}`);
    return [];
  });
  return composed(server, [...(locks ?? []), ...others], sessions, notes, locks === undefined);
}

/** Of what is no lock of a session's. */
const othersMs = 5000;

async function othersOf(server: Server, notes: string[]): Promise<Bare[]> {
  const closed = await closedTables(server, ["lease", "schedule_run", "queue", "queue_worker"]);
  if (closed.length > 0)
    notes.push(`What is in ${closed.join(", ")} is not shown: somebody has locked it, or waits to.`);
  const leases = closed.includes("lease")
    ? []
    : await allowed(leasesOf(server, notes), () => refusedLeases(server), notes).catch((error: unknown) => {
        // Somebody may have locked their table.
        notes.push(`Leases could not be read: ${shown(describe(error))}`);
        return [];
      });
  return [...(leases ?? []), ...(await patternsOf(server, closed))];
}

/** Only what sessions have locked and wait for. Throws if this user may not see that. */
export async function lookAtLocks(server: Server): Promise<Look> {
  const locks = await locksOf(server);
  return composed(server, locks, await sessionsIn(server, locks), [], false);
}

interface SeenSessions {
  readonly sessions: Sessions;
  /** Some that are there are hidden from this user. */
  readonly kept: boolean;
}

async function sessionsIn(server: Server, bare: readonly Bare[]): Promise<SeenSessions> {
  const ids = idsIn(bare);
  const sessions = await sessionsOf(server, ids);
  const missing = ids.some((id) => /^\d+$/.test(id) && !sessions.has(id));
  return { sessions, kept: missing && (await hides(server)) };
}

function idsIn(bare: readonly Bare[]): string[] {
  return bare.flatMap(({ session, blockedBy }) => [session.id, ...blockedBy]);
}

async function composed(
  server: Server,
  bare: readonly Bare[],
  { sessions, kept }: SeenSessions,
  notes: readonly string[],
  blind: boolean,
): Promise<Look> {
  // Of several, one that says since when.
  const known = new Map(
    bare
      .toSorted((a, b) => Number(a.session.since !== undefined) - Number(b.session.since !== undefined))
      .map(({ session }) => [session.id, session]),
  );
  const runs = await runsOf(server);
  const people = new Map(
    idsIn(bare).map((id) => {
      const person = personOf(server, id, known.get(id), sessions, kept);
      return [id, asExec(server, person, bare, runs)] as const;
    }),
  );
  const who = (id: string): Who => people.get(id) as Who;
  const entries = merged(bare.map((entry) => ({ ...entry, session: who(entry.session.id) })));
  const hidden = [...people.values()].some((person) => person.hidden);
  return {
    at: new Date(),
    entries,
    chains: chains(entries, who),
    notes: hidden ? [...notes, await refusedDetails(server)] : notes,
    blind,
  };
}

async function runsOf(server: Server): Promise<readonly ExecRun[]> {
  return (await closedTables(server, ["exec_run"])).length > 0 ? [] : unended(server);
}

/**
 * Sessions of PostgreSQL say who they are. Elsewhere it is the one that wrote down its run, if it has that lock: what was killed has left
 * its line behind, and after a restart of the server another session may have its number.
 */
function asExec({ kind }: Server, person: Who, bare: readonly Bare[], runs: readonly ExecRun[]): Who {
  const { id, application } = person;
  const says = kind === "postgres" && /^\d+$/.test(id);
  const names = bare
    .filter(({ granted, session, blockedBy }) => (granted && session.id === id) || blockedBy.includes(id))
    .map(({ name }) => plainName(name));
  const is = says ? /^holdfast exec\b/.test(application) : undefined;
  const run = runs.find(({ session, lock }) => session === id && (is ?? names.includes(lock)));
  if (!run && is !== true) return person;
  return {
    ...person,
    exec: { run },
    statement: run ? `holdfast exec: ${described(run)}` : person.statement,
  };
}

/** Of a session that is in the way of others the server may tell no more than that. */
function personOf(
  { kind }: Server,
  id: string,
  known: Session | undefined,
  sessions: Sessions,
  kept: boolean,
): Who {
  const found = sessions.get(id);
  const bare = known ?? {
    id,
    application: found?.application ?? "",
    state: id.startsWith("prepared ") ? "prepared" : (found?.state ?? "unknown"),
    since: found?.since,
  };
  if (!found) {
    const hidden = kept && /^\d+$/.test(id);
    const state = hidden ? "hidden" : bare.state;
    return {
      ...bare,
      application: hidden ? "" : bare.application,
      state,
      user: "",
      client: "",
      statement: "",
      hidden,
      elsewhere: false,
      worker: false,
    };
  }
  const { user, client, state, statement, hidden, here, worker } = found;
  // There it is made of the user and the address.
  const application = kind === "postgres" ? bare.application : "";
  return { ...bare, application, state, user, client, statement, hidden, elsewhere: !here, worker };
}

/** Undefined: this user may not look, and why is noted. */
async function allowed<T>(
  asking: Promise<readonly T[]>,
  why: () => Promise<string>,
  notes: string[],
): Promise<readonly T[] | undefined> {
  try {
    return await asking;
  } catch (error) {
    if (!isDenied(error)) throw error;
    notes.push(await why());
    return undefined;
  }
}

async function refusedLocks(server: Server): Promise<string> {
  const right = server.kind === "mysql" ? "SELECT ON performance_schema.*" : "PROCESS ON *.*";
  return `This user may not see locks, its own neither: GRANT ${right} TO ${await grantee(server)};`;
}

async function refusedLeases(server: Server): Promise<string> {
  const user = await grantee(server);
  const schema = schemaIn(server);
  const rights =
    server.kind === "postgres"
      ? `GRANT USAGE ON SCHEMA ${schema} TO ${user}; GRANT SELECT ON ALL TABLES IN SCHEMA ${schema} TO ${user};`
      : `GRANT SELECT ON ${server.own("lease")} TO ${user};`;
  return `This user may not see leases: ${rights}`;
}

async function refusedDetails(server: Server): Promise<string> {
  const right = server.kind === "postgres" ? "pg_monitor" : "PROCESS ON *.*";
  return `What sessions of other users do is hidden from this one, though not who waits for whom: GRANT ${right} TO ${await grantee(server)};`;
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

async function locksOf(server: Server): Promise<Bare[]> {
  const asking = server.hf.inspect().then(({ holders, waiters }) => [...holders, ...waiters]);
  // Where a file is the database, leases are among them.
  const locks = (await orNone(asking)).filter(({ kind }) => kind !== "lease");
  return server.kind === "sqlite" ? locks.flatMap((lock) => ofFile(lock, server)) : locks;
}

/** The file does not know who writes to it; the system may. */
function ofFile(lock: LockView, { url }: Server): LockView[] {
  const writers = lock.kind === "database" ? writersOf(fileOf(url)) : [];
  if (writers.length === 0) return [lock];
  return writers.map(({ pid, command }) => ({
    ...lock,
    session: { ...lock.session, id: String(pid), application: command },
  }));
}

/** More than anybody looks at one by one. */
const mostLeases = 1000;

async function leasesOf({ hf }: Server, notes: string[]): Promise<Bare[]> {
  const leases = await orNone(hf.leases(undefined, { limit: mostLeases }));
  if (leases.length === mostLeases)
    notes.push(`Of leases, the first ${mostLeases} are shown: holdfast lease --limit has more.`);
  return leases.map((lease): Bare => {
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
async function patternsOf({ kind, query, schema, own }: Server, closed: readonly string[]): Promise<Bare[]> {
  if (kind !== "postgres") return [];
  const [there] = await query(
    `SELECT CASE WHEN has_schema_privilege(oid, 'USAGE') THEN
      has_table_privilege(to_regclass('${own("schedule_run")}'), 'SELECT') END AS runs,
    CASE WHEN has_schema_privilege(oid, 'USAGE') THEN has_table_privilege(to_regclass('${own("queue_worker")}'), 'SELECT')
      AND has_table_privilege(to_regclass('${own("queue")}'), 'SELECT') END AS workers
    FROM pg_namespace WHERE nspname = $1`,
    [schema],
  );
  const found: Row[] = [];
  if (there?.["runs"] === true && !closed.includes("schedule_run"))
    found.push(
      ...(await query(`SELECT 'schedule' AS kind, 'schedule ' || schedule AS name, holder, fence::float8 AS fence,
        started AS since, until, state FROM ${own("schedule_run")}
        WHERE state = 'running' AND until > clock_timestamp() ORDER BY schedule, tick`)),
    );
  if (there?.["workers"] === true && !closed.includes("queue") && !closed.includes("queue_worker"))
    found.push(
      ...(await query(`SELECT 'queue' AS kind, 'queue ' || q.name || ': worker ' || w.id AS name, coalesce(w.name, '') AS holder,
        NULL AS fence, w.since, w.beat + w.ttl * interval '1 millisecond' AS until, 'working' AS state
        FROM ${own("queue_worker")} w JOIN ${own("queue")} q ON q.id = w.queue
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

/** The name without the number that it is a hash of. */
export function plainName(name: string): string {
  return name.replace(/ \((?:bigint -?\d+|int -?\d+,-?\d+)\)$/, "");
}
