import { randomBytes } from "node:crypto";
import { failureOf } from "holdfast";
import { within } from "../within.ts";
import { type Caller, answerMs } from "./caller.ts";
import { type Done, type Grant, type Kit, keyRows, longMs, rowIds, shortMs } from "./kit.ts";

/** So that a message takes as long as it does on a healthy server, several times over. */
const messageMs = 5000;

/**
 * `byRows`: locks are rows, since advisory locks were found to lock nothing. `ownSchema`: for users who may not make tables
 * in the schema that comes first.
 */
export function postgresKit(name: string, byRows: boolean, ownSchema = false): Kit {
  const inside = ownSchema ? `"${name}".` : "";
  const table = `${inside}"${name}"`;
  const routine = `${inside}"${name}_add"`;
  /** Keys that nobody else has. */
  const base = BigInt(`0x${randomBytes(6).toString("hex")}`) << 8n;
  const key = (n: number): string => `${base + BigInt(n)}`;
  const rowOf = (n: number): number => keyRows[n % keyRows.length] ?? 101;
  const patience = (ms: number): string => `SET LOCAL lock_timeout = ${ms}`;
  const exclusive = (n: number, ms: number): string =>
    byRows
      ? `SELECT id FROM ${table} WHERE id OPERATOR(pg_catalog.=) ${rowOf(n)} FOR UPDATE${ms === 0 ? " NOWAIT" : ""}`
      : ms === 0
        ? `SELECT pg_catalog.pg_try_advisory_xact_lock(${key(n)}::bigint) AS taken`
        : `SELECT pg_catalog.pg_advisory_xact_lock(${key(n)}::bigint)`;

  const kit: Kit = {
    make: [
      ...(ownSchema ? [`CREATE SCHEMA "${name}"`] : []),
      `CREATE TABLE ${table} (id integer PRIMARY KEY, n integer NOT NULL)`,
      `INSERT INTO ${table} VALUES ${[...rowIds, ...keyRows].map((id) => `(${id}, 0)`).join(", ")}`,
    ],
    remove: [
      `BEGIN; SET LOCAL lock_timeout = 2000; DROP TABLE IF EXISTS ${table}; DROP FUNCTION IF EXISTS ${routine}(integer)${ownSchema ? `; DROP SCHEMA IF EXISTS "${name}"` : ""}; COMMIT`,
    ],
    made: ownSchema ? `the schema ${name}` : `the table ${name} and the function ${name}_add`,
    gaps: {},

    async begin(caller, level) {
      await caller.query(`BEGIN ISOLATION LEVEL ${level.toUpperCase()}; ${patience(shortMs)}`);
    },
    async open(caller, n, ms) {
      // One message, as Holdfast sends it: what stands between may judge it by its first word.
      const text = `BEGIN ISOLATION LEVEL READ COMMITTED; ${patience(ms === 0 ? shortMs : ms)}; ${exclusive(n, ms)}`;
      return taken(caller, text);
    },
    lock: (caller, n, ms) => taken(caller, `${patience(ms === 0 ? shortMs : ms)}; ${exclusive(n, ms)}`),
    async share(caller, n) {
      await caller.query("BEGIN ISOLATION LEVEL READ COMMITTED");
      return taken(caller, `SELECT pg_catalog.pg_try_advisory_xact_lock_shared(${key(n)}::bigint) AS taken`);
    },
    end: (caller, how) => write(caller, how),
    async savepoint(caller, action) {
      await caller.query(action === "set" ? "SAVEPOINT certify" : "ROLLBACK TO SAVEPOINT certify");
    },

    async read(caller, id) {
      const [row] = await caller.query(`SELECT n FROM ${table} WHERE id OPERATOR(pg_catalog.=) ${id}`);
      return row === undefined ? undefined : Number(row["n"]);
    },
    write: (caller, id, n) =>
      write(caller, `UPDATE ${table} SET n = ${n} WHERE id OPERATOR(pg_catalog.=) ${id}`),
    insert: (caller, id) => write(caller, `INSERT INTO ${table} (id, n) VALUES (${id}, 0)`),
    async swap(caller, id, from, to) {
      const text = `UPDATE ${table} SET n = ${to} WHERE id OPERATOR(pg_catalog.=) ${id} AND n OPERATOR(pg_catalog.=) ${from} RETURNING n`;
      let changed = 0;
      const done = await write(caller, text, (rows) => (changed = rows));
      return done === "done" && changed === 0 ? "refused" : done;
    },
    async rows(caller, ids, wait) {
      const how = wait === "skip" ? " SKIP LOCKED" : wait === "nowait" ? " NOWAIT" : "";
      if (typeof wait === "number") await caller.query(patience(wait));
      try {
        const rows = await caller.query(
          `SELECT id FROM ${table} WHERE id OPERATOR(pg_catalog.=) ANY (ARRAY[${ids.join()}]) ORDER BY id FOR UPDATE${how}`,
        );
        return rows.map((row) => Number(row["id"]));
      } catch (error) {
        if (kindOf(error) === "lock-timeout") return "busy";
        throw error;
      }
    },

    async level(caller) {
      return String(
        (await caller.query("SELECT pg_catalog.current_setting('transaction_isolation') AS level"))[0]?.[
          "level"
        ],
      );
    },
    async id(caller) {
      return String((await caller.query("SELECT pg_catalog.pg_backend_pid() AS pid"))[0]?.["pid"]);
    },
    async take(caller, n) {
      return (
        (await caller.query(`SELECT pg_catalog.pg_try_advisory_lock(${key(n)}::bigint) AS taken`))[0]?.[
          "taken"
        ] === true
      );
    },
    async give(caller, n) {
      return (
        (await caller.query(`SELECT pg_catalog.pg_advisory_unlock(${key(n)}::bigint) AS given`))[0]?.[
          "given"
        ] === true
      );
    },
    async message(server) {
      const { Client } = await import("pg");
      const channel = `holdfast_certify_${randomBytes(8).toString("hex")}`;
      const listener = new Client({ connectionString: server.url, connectionTimeoutMillis: 10_000 });
      listener.on("error", () => {});
      await listener.connect();
      try {
        const heard = new Promise<true>((resolve) =>
          listener.on("notification", (message) => {
            if (message.channel === channel) resolve(true);
          }),
        );
        await within(answerMs, listener.query(`LISTEN ${channel}`));
        await within(answerMs, server.query(`NOTIFY ${channel}`));
        return await within(messageMs, heard).catch(() => false);
      } finally {
        // What has not said goodbye by then is ended with the process.
        await within(1000, listener.end()).catch(() => {});
      }
    },
    async routine(caller) {
      await caller.query(
        `CREATE FUNCTION ${routine}(a integer) RETURNS integer LANGUAGE plpgsql AS $$ BEGIN RETURN a OPERATOR(pg_catalog.+) 1; END $$`,
      );
      return Number((await caller.query(`SELECT ${routine}(41) AS n`))[0]?.["n"]);
    },
    async limited(caller, n, ms) {
      // As the library does, by the server's own limit where it has one for a whole transaction.
      await caller.query(
        `BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL idle_in_transaction_session_timeout = ${ms}; SET LOCAL statement_timeout = ${longMs}; ${exclusive(n, longMs)}`,
      );
    },
    async identity(caller) {
      return String(
        (await caller.query("SELECT pg_catalog.pg_current_xact_id()::pg_catalog.text AS xid"))[0]?.["xid"],
      );
    },
    async outcome(caller, identity) {
      return String(
        (
          await caller.query(
            `SELECT pg_catalog.pg_xact_status('${identity.replaceAll(/\D/g, "")}'::pg_catalog.xid8) AS status`,
          )
        )[0]?.["status"],
      );
    },
    async clock(caller) {
      const [row] = await caller.query(
        "SELECT extract(epoch FROM pg_catalog.clock_timestamp()) OPERATOR(pg_catalog.*) 1000 AS ms",
      );
      return Number(row?.["ms"]);
    },
  };

  async function taken(caller: Caller, text: string): Promise<Grant> {
    try {
      if ((await caller.query(text))[0]?.["taken"] !== false) return "granted";
    } catch (error) {
      if (kindOf(error) !== "lock-timeout") throw error;
    }
    await caller.query("ROLLBACK");
    return "busy";
  }

  async function write(caller: Caller, text: string, changed?: (rows: number) => void): Promise<Done> {
    try {
      const rows = await caller.query(text);
      changed?.(rows.length);
      return "done";
    } catch (error) {
      const kind = kindOf(error);
      if (kind === "lock-timeout") return "busy";
      if (kind === "unique") return "duplicate";
      if (kind === "serialization" || kind === "deadlock") return "refused";
      throw error;
    }
  }

  return kit;
}

const kindOf = (error: unknown): string | undefined => failureOf(error)?.kind;
