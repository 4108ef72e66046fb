/** What the server has counted, and how much room is left. */
import { plural } from "../../text.ts";
import { age } from "../../terminal.ts";
import { type Check, type Finding, findings } from "../check.ts";
import { type PostgresPatient, name, table } from "./patient.ts";

type PostgresCheck = Check<PostgresPatient>;

const connections: PostgresCheck = {
  id: "connections",
  title: "more than 80 % of the connections are in use",
  async run(patient) {
    const settings = await patient.settings();
    const of = (setting: string): number => Number(settings.get(setting)?.value ?? 0);
    const cap = of("max_connections") - of("superuser_reserved_connections") - of("reserved_connections");
    const [row] = await patient.look(`SELECT (SELECT sum(numbackends) FROM pg_stat_database)::int AS used,
  (SELECT datconnlimit FROM pg_database WHERE datname = current_database()) AS database_cap,
  (SELECT numbackends FROM pg_stat_database WHERE datname = current_database()) AS database_used,
  (SELECT rolconnlimit FROM pg_roles WHERE rolname = current_user) AS role_cap,
  (SELECT count(*) FROM pg_stat_activity WHERE usename = current_user)::int AS role_used`);
    const limits = [
      { of: "the server (max_connections)", used: row?.["used"], cap, fix: more(of("max_connections")) },
      {
        of: `database ${patient.me.database}`,
        used: row?.["database_used"],
        cap: row?.["database_cap"],
        fix: `ALTER DATABASE ${name(patient.me.database)} CONNECTION LIMIT -1;`,
      },
      {
        of: `role ${patient.me.role}`,
        used: row?.["role_used"],
        cap: row?.["role_cap"],
        fix: `ALTER ROLE ${name(patient.me.role)} CONNECTION LIMIT -1;`,
      },
    ];
    return limits.flatMap(({ of: whose, used, cap: most, fix }): Finding[] => {
      const share = Number(used) / Number(most);
      if (!(Number(most) > 0) || share < 0.8) return [];
      return [
        {
          severity: share >= 0.95 ? "error" : "warning",
          what: `${String(used)} of ${String(most)} connections of ${whose} are in use`,
          why: "Whoever waits for a lock keeps its connection. A few more waiters, and nobody gets one, not even the holder's next step.",
          fix,
        },
      ];
    });
  },
};

const more = (now: number): string =>
  `ALTER SYSTEM SET max_connections = ${now * 2};   -- and restart; or smaller pools, or PgBouncer`;

const lockTable: PostgresCheck = {
  id: "lock-table",
  title: "the server's lock table is more than half full",
  async run(patient) {
    const settings = await patient.settings();
    const of = (setting: string): number => Number(settings.get(setting)?.value ?? 0);
    const each = of("max_locks_per_transaction");
    const cap = each * (of("max_connections") + of("max_prepared_transactions"));
    const [row] =
      await patient.look(`SELECT count(DISTINCT (locktype, database, relation, page, tuple, virtualxid, transactionid::text, classid, objid, objsubid))::int AS used
FROM pg_locks WHERE NOT fastpath`);
    const used = Number(row?.["used"]);
    if (cap === 0 || used < cap / 2) return [];
    return [
      {
        severity: used < cap * 0.9 ? "warning" : "error",
        what: `${plural(used, "lock")}, room for some ${plural(cap, "lock")} (max_locks_per_transaction ${each})`,
        why: 'When it is full, every session\'s next lock fails with "out of shared memory". Each advisory lock takes a place until it is given back.',
        fix: `ALTER SYSTEM SET max_locks_per_transaction = ${each * 4};   -- and restart; or lock fewer keys in one transaction`,
      },
    ];
  },
};

/** A few in a week are normal life where transactions are retried. */
const deadlocks: PostgresCheck = {
  id: "deadlocks",
  title: "more than ten deadlocks a day (and at least 5)",
  async run(patient) {
    const [row] = await patient.look(`SELECT deadlocks::int AS count,
  extract(epoch FROM clock_timestamp() - coalesce(stats_reset, pg_postmaster_start_time())) * 1000 AS ms
FROM pg_stat_database WHERE datname = current_database()`);
    const count = Number(row?.["count"]);
    const ms = Number(row?.["ms"]);
    if (count < 5 || (count / ms) * 86_400_000 <= 10) return [];
    return [
      {
        severity: "warning",
        what: `${plural(count, "deadlock")} in ${age(ms)}`,
        why: "Transactions take the same locks in different orders. Each one costs deadlock_timeout for two sessions, and its work is done twice.",
        fix: "hf.transaction({ lock: [keyA, keyB] }, …)   // all keys in one call are taken in one order; or tx.rows for rows",
      },
    ];
  },
};

const seqScans: PostgresCheck = {
  id: "seq-scans",
  title: "a big table is read in full, again and again: a query that should lock one row has no index",
  async run(patient) {
    const rows =
      await patient.look(`SELECT schemaname AS schema, relname AS "table", seq_scan::bigint::text AS scans, (seq_tup_read / seq_scan)::bigint::text AS rows
FROM pg_stat_user_tables WHERE seq_scan > 1000 AND seq_tup_read / seq_scan > 10000 AND schemaname NOT IN ('holdfast', '${patient.server.schema}') ORDER BY seq_tup_read DESC LIMIT 1000`);
    return findings(
      "hint",
      "SELECT … FOR UPDATE or UPDATE by a column without an index reads every row, and holds its locks for as long as that takes.",
      rows.map((row) => ({
        what: `${table(row)}: read in full ${Number(row["scans"]).toLocaleString("en")} times, ${Number(row["rows"]).toLocaleString("en")} rows each`,
        fix: `CREATE INDEX CONCURRENTLY ON ${table(row)} (…);   -- the columns of the WHERE; SELECT * FROM pg_stat_statements ORDER BY shared_blks_hit DESC tells which query`,
      })),
    );
  },
};

const bloat: PostgresCheck = {
  id: "queue-bloat",
  title: "a table has more dead rows than live ones, Holdfast's own too",
  async run(patient) {
    const rows =
      await patient.look(`SELECT schemaname AS schema, relname AS "table", n_live_tup::text AS live, n_dead_tup::text AS dead, last_autovacuum AS vacuumed
FROM pg_stat_user_tables WHERE n_dead_tup > 10000 AND n_dead_tup > n_live_tup ORDER BY n_dead_tup DESC LIMIT 1000`);
    return findings(
      "warning",
      "Every look for the next job, or for a counter, walks over the dead rows. Vacuum is late, or an old transaction or an unused replication slot keeps it from its work.",
      rows.map((row) => ({
        what: `${table(row)}: ${plural(Number(row["dead"]), "dead row")}, ${Number(row["live"]).toLocaleString("en")} live; vacuumed ${row["vacuumed"] instanceof Date ? row["vacuumed"].toISOString() : "never by itself"}`,
        fix: `VACUUM (ANALYZE) ${table(row)};\nALTER TABLE ${table(row)} SET (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 1000);`,
      })),
    );
  },
};

export const loadChecks: readonly PostgresCheck[] = [connections, lockTable, deadlocks, seqScans, bloat];
