import { failureOf } from "holdfast";
import type { Caller } from "./caller.ts";
import { type Done, type Kit, keyRows, rowIds } from "./kit.ts";

/** Statements here keep the whole process: nobody waits, since the one who is waited for could not go on. */
const opening = "PRAGMA busy_timeout = 0";

const strict = "transactions here are serializable whatever is asked for, which is stricter";
const alone = "the file has one writer at a time, who needs no lock of a row";

export function sqliteKit(name: string): Kit {
  const table = `"${name}"`;
  return {
    make: [
      `CREATE TABLE ${table} (id integer PRIMARY KEY, n integer NOT NULL)`,
      `INSERT INTO ${table} VALUES ${[...rowIds, ...keyRows].map((id) => `(${id}, 0)`).join()}`,
    ],
    remove: [`DROP TABLE IF EXISTS ${table}`],
    made: `the table ${name}`,
    opening,
    gaps: {
      "read-committed": strict,
      "row-lock": alone,
      "skip-locked": alone,
      "shared-locks": "writers do not share",
      "savepoint-locks": "a transaction has its lock from its beginning",
      "session-stays": "a file has no sessions",
      "session-lock": "a lock that outlives its transaction would keep every writer of the file out",
      notify: "a file tells nobody that it has changed",
      procedures: "a file has no procedures, and nothing here needs them",
      "server-deadline": "the database is part of the process: nobody else can end its transactions",
      "commit-outcome": "there is no connection to lose between the process and the file",
    },

    async begin(caller) {
      await caller.query("BEGIN");
    },
    async open(caller) {
      return (await done(caller, "BEGIN IMMEDIATE")) === "done" ? "granted" : "busy";
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
    async swap(caller, id, from, to) {
      const text = `UPDATE ${table} SET n = ${to} WHERE id = ${id} AND n = ${from} RETURNING n`;
      let changed = 0;
      const found = await done(caller, text, (rows) => (changed = rows));
      return found === "done" && changed === 0 ? "refused" : found;
    },
    async clock(caller) {
      const [row] = await caller.query("SELECT (julianday('now') - 2440587.5) * 86400000 AS ms");
      return Number(row?.["ms"]);
    },
  };
}

async function done(caller: Caller, text: string, changed?: (rows: number) => void): Promise<Done> {
  try {
    const rows = await caller.query(text);
    changed?.(rows.length);
    return "done";
  } catch (error) {
    const { errcode } = error as { readonly errcode?: number };
    // SQLITE_BUSY and SQLITE_LOCKED, with whatever they add to it.
    if (errcode !== undefined && [5, 6].includes(errcode & 0xff)) return "busy";
    if (failureOf(error)?.kind === "unique") return "duplicate";
    throw error;
  }
}
