/** How far the counters of transactions and multixacts have run ahead of what is frozen. */
import { listed } from "../../text.ts";
import type { Row } from "../../server.ts";
import type { Check, Finding } from "../check.ts";
import { type PostgresPatient, literal, name } from "./patient.ts";

/** Of two billion; autovacuum stops caring about anything else here (vacuum_failsafe_age). */
const failsafe = 1_600_000_000;

/**
 * Autovacuum begins to freeze at autovacuum_freeze_max_age, and needs its time on a big table. At twice that it does not get on:
 * something holds it back, or it fails.
 */
const databases = `SELECT d.datname AS database, d.datname = pg_catalog.current_database() AS here, d.datallowconn AS open, c.counter,
  c.age::text AS age, c.most::text AS most, c.age >= c.failsafe AS late
FROM pg_catalog.pg_database d, LATERAL (VALUES
  ('transaction ids', pg_catalog.age(d.datfrozenxid), pg_catalog.current_setting('autovacuum_freeze_max_age')::bigint,
    coalesce(pg_catalog.current_setting('vacuum_failsafe_age', true)::bigint, ${failsafe})),
  ('multixact ids', pg_catalog.mxid_age(d.datminmxid), pg_catalog.current_setting('autovacuum_multixact_freeze_max_age')::bigint,
    coalesce(pg_catalog.current_setting('vacuum_multixact_failsafe_age', true)::bigint, ${failsafe}))
) AS c (counter, age, most, failsafe)
WHERE c.age > 2 * c.most ORDER BY c.age DESC LIMIT 1000`;

const oldest = `SELECT n.nspname AS schema, c.relname AS "table", pg_catalog.age(c.relfrozenxid)::text AS "transaction ids",
  pg_catalog.mxid_age(c.relminmxid)::text AS "multixact ids"
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'm', 't') ORDER BY greatest(pg_catalog.age(c.relfrozenxid), pg_catalog.mxid_age(c.relminmxid)) DESC LIMIT 3`;

/** Vacuum cannot freeze what these may still want to see. The oldest first. */
const holders = `SELECT h.who, h.fix FROM (
  SELECT 'replication slot ' || slot_name::text, 'SELECT pg_drop_replication_slot(' || pg_catalog.quote_literal(slot_name::text) || ');   -- only if its consumer is gone: else start that',
    greatest(pg_catalog.age(xmin), pg_catalog.age(catalog_xmin)) FROM pg_catalog.pg_replication_slots
  UNION ALL SELECT 'prepared transaction ' || gid, 'ROLLBACK PREPARED ' || pg_catalog.quote_literal(gid) || ';   -- or COMMIT PREPARED, as its coordinator decided', pg_catalog.age(transaction)
    FROM pg_catalog.pg_prepared_xacts
  UNION ALL SELECT CASE backend_type WHEN 'client backend' THEN 'session ' ELSE backend_type || ' ' END || pid::text,
    CASE backend_type WHEN 'client backend' THEN 'holdfast kill ' || pid::text
      WHEN 'walsender' THEN 'Look at the consumer of walsender ' || pid::text || ': a long query on a replica with hot_standby_feedback, or one that does not confirm what it has read.' END,
    greatest(pg_catalog.age(backend_xmin), pg_catalog.age(backend_xid)) FROM pg_catalog.pg_stat_activity
) AS h (who, fix, age) WHERE h.age > pg_catalog.current_setting('autovacuum_freeze_max_age')::bigint ORDER BY h.age DESC LIMIT 3`;

const count = (value: unknown): string => Number(value).toLocaleString("en");

export const wraparound: Check<PostgresPatient> = {
  id: "wraparound",
  title: "transaction or multixact ids are far older than autovacuum lets them become",
  async run(patient): Promise<readonly Finding[]> {
    // It has them from the primary, and cannot vacuum.
    if (patient.me.standby) return [];
    const rows = await patient.look(databases);
    if (rows.length === 0) return [];
    const tables = await patient.look(oldest);
    const inTheWay = await patient.look(holders);
    return rows.map((row) => ({
      severity: row["late"] === true ? "error" : "warning",
      what: [
        `database ${String(row["database"])}: the oldest ${String(row["counter"])} are ${count(row["age"])} old, autovacuum freezes them at ${count(row["most"])}`,
        ...(row["here"] === true
          ? [`the oldest tables are ${listed(tables.map((each) => aged(each, row)))}`]
          : []),
        ...(inTheWay.length > 0
          ? [`held back by ${listed(inTheWay.map((each) => String(each["who"])))}`]
          : []),
      ].join("; "),
      why: "At two billion the server refuses every statement that writes, until somebody has vacuumed by hand. Autovacuum does not get on: something that is old holds it back, or it fails.",
      fix: [
        ...inTheWay.flatMap((each) => (each["fix"] === null ? [] : [String(each["fix"])])),
        ...freeze(row),
      ].join("\n"),
    }));
  },
};

const aged = (table: Row, { counter }: Row): string =>
  `${String(table["schema"])}.${String(table["table"])} (${count(table[String(counter)])})`;

function freeze({ database, here, open }: Row): string[] {
  if (here === true) return ["VACUUM (FREEZE);"];
  const shown = String(database);
  const vacuum = `vacuumdb --freeze --dbname=${literal(shown)}`;
  if (open === true) return [vacuum];
  const allow = (may: boolean) => `ALTER DATABASE ${name(shown)} ALLOW_CONNECTIONS ${may};`;
  return [allow(true), vacuum, allow(false)];
}
