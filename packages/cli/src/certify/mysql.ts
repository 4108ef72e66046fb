import { failureOf } from "holdfast";
import type { Row } from "../server.ts";
import type { Caller } from "./caller.ts";
import { type Done, type Grant, type Kit, keyRows, rowIds } from "./kit.ts";

/** For both members of the family. */
export function mysqlKit(name: string): Kit {
  const table = `\`${name}\``;
  const routine = `\`${name}_add\``;
  const rowOf = (n: number): number => keyRows[n % keyRows.length] ?? 101;
  const lockName = (n: number): string => `'${name}_${n}'`;
  // The server counts such waits in seconds, and 0 is not one of them.
  const patience = (caller: Caller, ms: number): Promise<unknown> =>
    caller.query(`SET SESSION innodb_lock_wait_timeout = ${Math.max(1, Math.ceil(ms / 1000))}`);
  const begin = async (caller: Caller, level: string): Promise<void> => {
    await patience(caller, 0);
    await caller.query(`SET TRANSACTION ISOLATION LEVEL ${level.toUpperCase()}`);
    await caller.query("START TRANSACTION");
  };
  const lock = async (caller: Caller, n: number, ms: number): Promise<Grant> => {
    try {
      if (ms > 0) await patience(caller, ms);
      await caller.query(
        `SELECT id FROM ${table} WHERE id = ${rowOf(n)} FOR UPDATE${ms === 0 ? " NOWAIT" : ""}`,
      );
      // As Holdfast does: a cluster compares at COMMIT what was written, and not what was locked.
      await caller.query(`UPDATE ${table} SET n = n + 1 WHERE id = ${rowOf(n)}`);
      return "granted";
    } catch (error) {
      const kind = failureOf(error)?.kind;
      if (kind !== "lock-timeout" && kind !== "deadlock" && kind !== "serialization") throw error;
      await caller.query("ROLLBACK");
      return "busy";
    }
  };

  return {
    make: [
      `CREATE TABLE ${table} (id integer PRIMARY KEY, n integer NOT NULL) ENGINE = InnoDB`,
      `INSERT INTO ${table} VALUES ${[...rowIds, ...keyRows].map((id) => `(${id}, 0)`).join()}`,
    ],
    remove: [
      "SET SESSION lock_wait_timeout = 2",
      `DROP TABLE IF EXISTS ${table}`,
      `DROP PROCEDURE IF EXISTS ${routine}`,
    ],
    made: `the table ${name} and the procedure ${name}_add`,
    gaps: {
      "shared-locks": "a lock is a row that each holder writes to",
      notify: "the server cannot send messages to its clients",
      "commit-outcome":
        "the server keeps no record of how a transaction ended: those with a lock write one of their own",
    },

    begin,
    async open(caller, n, ms) {
      await begin(caller, "read committed");
      return lock(caller, n, ms);
    },
    lock,
    async limited(caller, n, ms) {
      // As the library does: by how long a session may be silent, in whole seconds.
      await begin(caller, "read committed");
      await lock(caller, n, ms);
      await caller.query(`SET SESSION wait_timeout = ${Math.max(1, Math.ceil(ms / 1000))}`);
    },
    end: (caller, how) => done(caller, how),
    async savepoint(caller, action) {
      await caller.query(action === "set" ? "SAVEPOINT certify" : "ROLLBACK TO SAVEPOINT certify");
    },

    async read(caller, id) {
      const [row] = await caller.query(`SELECT n FROM ${table} WHERE id = ${id}`);
      return row === undefined ? undefined : Number(row["n"]);
    },
    write: (caller, id, n) => done(caller, `UPDATE ${table} SET n = ${n} WHERE id = ${id}`),
    insert: (caller, id) => done(caller, `INSERT INTO ${table} (id, n) VALUES (${id}, 0)`),
    swap: (caller, id, from, to) =>
      done(caller, `UPDATE ${table} SET n = ${to} WHERE id = ${id} AND n = ${from}`, true),
    async rows(caller, ids, wait) {
      const how = wait === "skip" ? " SKIP LOCKED" : wait === "nowait" ? " NOWAIT" : "";
      if (typeof wait === "number") await patience(caller, wait);
      try {
        const rows = await caller.query(
          `SELECT id FROM ${table} WHERE id IN (${ids.join()}) ORDER BY id FOR UPDATE${how}`,
        );
        return rows.map((row) => Number(row["id"]));
      } catch (error) {
        if (failureOf(error)?.kind === "lock-timeout") return "busy";
        throw error;
      }
    },

    async id(caller) {
      return String((await caller.query("SELECT CONNECTION_ID() AS id"))[0]?.["id"]);
    },
    async take(caller, n) {
      return (
        String((await caller.query(`SELECT GET_LOCK(${lockName(n)}, 0) AS taken`))[0]?.["taken"]) === "1"
      );
    },
    async give(caller, n) {
      return (
        String((await caller.query(`SELECT RELEASE_LOCK(${lockName(n)}) AS given`))[0]?.["given"]) === "1"
      );
    },
    async routine(caller) {
      await caller.query(`CREATE PROCEDURE ${routine}(IN a integer) SELECT a + 1 AS n`);
      // A procedure may have several results.
      const [rows] = (await caller.query(`CALL ${routine}(41)`)) as unknown as Row[][];
      return Number(rows?.[0]?.["n"]);
    },
    async cluster({ query }) {
      // Everybody may see these.
      const rows = await query(
        "SHOW GLOBAL VARIABLES WHERE Variable_name IN ('wsrep_on', 'group_replication_group_name') AND Value NOT IN ('', 'OFF', '0')",
      );
      const [found] = rows.map((row) => String(row["Variable_name"]));
      return found && (found === "wsrep_on" ? "Galera" : "Group Replication");
    },
    async clock(caller) {
      // Not NOW(), which stands still within a statement.
      return Number((await caller.query("SELECT UNIX_TIMESTAMP(SYSDATE(6)) * 1000 AS ms"))[0]?.["ms"]);
    },
  };
}

async function done(caller: Caller, text: string, mustChange = false): Promise<Done> {
  try {
    const { affectedRows } = (await caller.query(text)) as unknown as { readonly affectedRows?: number };
    return mustChange && affectedRows === 0 ? "refused" : "done";
  } catch (error) {
    const kind = failureOf(error)?.kind;
    if (kind === "lock-timeout") return "busy";
    if (kind === "unique") return "duplicate";
    if (kind === "serialization" || kind === "deadlock") return "refused";
    throw error;
  }
}
