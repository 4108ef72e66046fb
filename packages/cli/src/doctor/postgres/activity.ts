/** Who holds, and who waits, at this moment. */
import { type Session, safePath } from "../../server.ts";
import { age } from "../../terminal.ts";
import { within } from "../../within.ts";
import { type Check, type Finding, blind, findings, lostWith, short } from "../check.ts";
import { involved, waitsCheck } from "../waits.ts";
import { type PostgresPatient, literal, name } from "./patient.ts";

type PostgresCheck = Check<PostgresPatient>;

/** Sessions of other roles are there, but what they do is hidden. */
function hidden({ me }: PostgresPatient): Finding[] {
  if (me.monitor) return [];
  return [
    blind("sessions of other roles are hidden; it needs pg_monitor", `GRANT pg_monitor TO ${name(me.role)};`),
  ];
}

const who = (row: Record<string, unknown>): string =>
  [
    `session ${String(row["pid"])}`,
    row["role"] === null ? "" : ` of ${String(row["role"])}`,
    row["application"] ? ` (${String(row["application"])})` : "",
  ].join("");

const sql = (pid: unknown): string => `SELECT pg_terminate_backend(${String(pid)});`;

const end = (pid: unknown): string => `holdfast kill ${String(pid)}   # in SQL: ${sql(pid)}`;

function endAtWork(row: Record<string, unknown>): string {
  const lost = lostWith(String(row["application"]), String(row["query"]));
  return lost === undefined ? end(row["pid"]) : `Let it end. ${lost}`;
}

const session = `a.pid, a.usename AS role, a.application_name AS application, a.query`;

const longTransactions: PostgresCheck = {
  id: "long-transactions",
  title: "a transaction has been at work for more than a minute, in nobody's way",
  async run(patient) {
    const told = await involved(patient);
    const rows =
      await patient.look(`SELECT ${session}, extract(epoch FROM clock_timestamp() - a.xact_start) * 1000 AS ms
FROM pg_stat_activity a WHERE a.datname = current_database() AND a.backend_type = 'client backend' AND a.state = 'active'
  AND a.xact_start < clock_timestamp() - interval '1 minute' AND a.pid <> pg_backend_pid() ORDER BY a.xact_start LIMIT 1000`);
    return [
      ...findings(
        "warning",
        "Its locks are kept that long, and nothing that died since can be cleaned up in any table: queues and counters get slow.",
        rows
          .filter((row) => !told.has(String(row["pid"])))
          .map((row) => ({
            what: `${who(row)}: ${age(Number(row["ms"]))}, now ${short(patient.server.hf.redacted(String(row["query"])))}`,
            fix: endAtWork(row),
          })),
      ),
      ...hidden(patient),
    ];
  },
};

/** Those in whose way somebody is are told by `waits`. A round trip of the application is shorter than this. */
const idleHolders: PostgresCheck = {
  id: "idle-holders",
  title: "a session has been in a transaction for ten seconds and does nothing, in nobody's way yet",
  async run(patient) {
    const told = await involved(patient);
    const rows =
      await patient.look(`SELECT ${session}, extract(epoch FROM clock_timestamp() - a.state_change) * 1000 AS ms,
  (SELECT string_agg(DISTINCT CASE WHEN l.locktype = 'advisory' THEN 'an advisory lock' ELSE l.relation::regclass::text END, ', ')
    FROM pg_locks l WHERE l.pid = a.pid AND l.granted AND (l.locktype = 'advisory' OR l.locktype = 'relation'
      AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND l.mode NOT IN ('AccessShareLock') AND (l.relation::regclass::text NOT LIKE 'pg_%')
      AND EXISTS (SELECT FROM pg_class c WHERE c.oid = l.relation AND c.relkind IN ('r', 'p')))) AS holds
FROM pg_stat_activity a WHERE a.datname = current_database() AND a.backend_type = 'client backend' AND a.state LIKE 'idle in transaction%'
  AND a.state_change < clock_timestamp() - interval '10 seconds' ORDER BY a.state_change LIMIT 1000`);
    return [
      ...findings(
        "warning",
        "Whatever it locked stays locked while it does nothing: a forgotten COMMIT, a call over the network inside of a transaction, or a frozen process.",
        rows
          .filter((row) => !told.has(String(row["pid"])))
          .map((row) => ({
            what: `${who(row)} is idle in a transaction for ${age(Number(row["ms"]))}${row["holds"] ? `, holds ${short(row["holds"], 80)}` : ""}`,
            fix: end(row["pid"]),
          })),
      ),
      ...hidden(patient),
    ];
  },
};

/** More than a pooler has idle connections, as a rule. */
const mostLent = 20;

/**
 * Which of these sessions are the pooler's: those that it gives us. It has no other idle ones left when it opens a new one. Other
 * sessions are of programs that are connected directly, or by another pooler.
 */
async function lent(patient: PostgresPatient, wanted: readonly string[]): Promise<ReadonlySet<string>> {
  const found = new Set<string>();
  const taken: Session[] = [];
  try {
    const [before] = await patient.look("SELECT clock_timestamp()::text AS now");
    let fresh = false;
    while (!fresh && taken.length < mostLent && wanted.some((pid) => !found.has(pid))) {
      const next = await within(lentMs, patient.session());
      taken.push(next);
      await within(lentMs, next.query(`BEGIN READ ONLY; ${safePath}`));
      const [row] = await within(
        lentMs,
        next.query(
          "SELECT pid::text, backend_start > $1::timestamptz AS fresh FROM pg_catalog.pg_stat_activity WHERE pid = pg_backend_pid()",
          [before?.["now"]],
        ),
      );
      found.add(String(row?.["pid"]));
      fresh = row?.["fresh"] === true;
    }
  } catch {
    // It has none to give: what was found is all that is known.
  } finally {
    // A pooler closes what a client has left in a transaction.
    for (const each of taken)
      await within(lentMs, each.query("ROLLBACK"))
        .then(() => each[Symbol.asyncDispose]())
        .catch(() => each.destroy());
  }
  return found;
}

/** A pooler on a busy machine takes its time to open a session. */
const lentMs = 5000;

/**
 * Through a pooler in transaction mode a session lock stays on a connection that belongs to nobody. Elsewhere one that lasts is what
 * `hf.hold` is for: its name is in application_name, and it sends a heartbeat every 5 s.
 */
const namedLocks: PostgresCheck = {
  id: "named-locks",
  title: "a session lock (pg_advisory_lock) that nobody seems to own any more",
  async run(patient) {
    const pooled = (await patient.pooling()) === "transaction";
    const rows = await patient.look(
      `SELECT ${session}, extract(epoch FROM clock_timestamp() - a.state_change) * 1000 AS ms,
  a.state = 'idle' AND a.state_change < clock_timestamp() - interval '1 hour' AS long,
  string_agg(CASE l.objsubid WHEN 1 THEN ((l.classid::bigint << 32) | l.objid::bigint)::text ELSE l.classid::int4::text || ', ' || l.objid::int4::text END, '; ') AS keys
FROM pg_locks l JOIN pg_stat_activity a USING (pid)
WHERE l.locktype = 'advisory' AND l.granted AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND a.application_name NOT LIKE '%[hf:%'
  AND CASE WHEN $1 THEN a.pid = pg_backend_pid() OR a.state = 'idle' AND
      (a.state_change < clock_timestamp() - interval '10 s' OR a.application_name = current_setting('application_name'))
    ELSE a.state = 'idle' AND a.state_change < clock_timestamp() - interval '1 hour' END
GROUP BY a.pid, a.usename, a.application_name, a.query, a.state, a.state_change ORDER BY a.state_change LIMIT 1000`,
      [pooled],
    );
    const poolers = pooled
      ? await lent(
          patient,
          rows.map(({ pid }) => String(pid)),
        )
      : new Set<string>();
    const isPoolers = (row: Record<string, unknown>): boolean => poolers.has(String(row["pid"]));
    const found = (which: typeof rows, why: string, named: (row: Record<string, unknown>) => string) =>
      findings(
        "warning",
        why,
        which.map((row) => ({
          what: `${named(row)} holds advisory lock ${short(row["keys"], 80)}`,
          fix: end(row["pid"]),
        })),
      );
    return [
      ...found(
        rows.filter(isPoolers),
        "A pooler in transaction mode has given its connection to others: nobody can give the lock back, and nobody else gets it.",
        (row) => `a pooled session (${String(row["pid"])})`,
      ),
      ...found(
        rows.filter((row) => !isPoolers(row) && row["long"] === true),
        "Whoever wants it waits until that session ends. If its process no longer knows of the lock, that is never.",
        (row) => `${who(row)}, idle for ${age(Number(row["ms"]))},`,
      ),
      ...hidden(patient),
    ];
  },
};

const preparedTransactions: PostgresCheck = {
  id: "prepared-transactions",
  title: "a two-phase commit that nobody has finished for more than 5 seconds",
  async run(patient) {
    const rows =
      await patient.look(`SELECT gid, owner, database, extract(epoch FROM clock_timestamp() - prepared) * 1000 AS ms
FROM pg_prepared_xacts WHERE database = current_database() AND prepared < clock_timestamp() - interval '5 seconds' ORDER BY prepared LIMIT 1000`);
    return findings(
      "error",
      "It keeps its locks without any session, also over a restart, and no limit of time ends it.",
      rows.map((row) => ({
        what: `prepared transaction ${String(row["gid"])} of ${String(row["owner"])}, ${age(Number(row["ms"]))} old`,
        fix: `ROLLBACK PREPARED ${literal(String(row["gid"]))};   -- or COMMIT PREPARED, as its coordinator decided`,
      })),
    );
  },
};

export const activityChecks: readonly PostgresCheck[] = [
  waitsCheck({ end: sql }),
  idleHolders,
  longTransactions,
  namedLocks,
  preparedTransactions,
];
