/** Where programs run on SQLite. */
import Database from "better-sqlite3";
import { inThread } from "holdfast/testing";
import { placeFor } from "../places.ts";
import { type Ground, resetText, rowsText, valuesOf } from "./ground.ts";
import { type Answer, Refused } from "./program.ts";
import { sendTo } from "./sqlite-actor.ts";

const tables = `
  CREATE TABLE t (id int PRIMARY KEY, n int NOT NULL);
  CREATE TABLE u (id int PRIMARY KEY, n int NOT NULL);
  CREATE TABLE l (v int NOT NULL);
  CREATE TABLE f (t int NOT NULL REFERENCES t (id));
  CREATE TABLE g (v int NOT NULL);
  CREATE VIEW w AS SELECT coalesce(sum(n), 0) AS s FROM t;
  CREATE TRIGGER note AFTER INSERT ON g BEGIN INSERT INTO l SELECT count(*) FROM l; END;`;

const module = new URL("sqlite-actor.ts", import.meta.url);

export async function onSqlite(): Promise<Ground> {
  const place = await placeFor({ server: "file" });
  const owner = new Database(place.url);
  owner.pragma("journal_mode = WAL");
  owner.exec(tables);
  let made = 0;
  /** Statements that wait until they can be tried again, in the order in which they came. */
  const pending = new Map<string, () => void>();
  return {
    actor: (program) => inThread(module, "run", place.url, program),
    autocommit: "is atomic",
    async connect() {
      const db = new Database(place.url, { timeout: 0 });
      const id = String(++made);
      /** The transaction has read, and so would not wait for a lock. */
      let reads = false;
      const attempt = (text: string) => {
        const answer = sendTo(db, text);
        if (!db.inTransaction) reads = false;
        else if (!/^(begin|savepoint|release)\b/i.test(text)) reads = true;
        return answer;
      };
      const send = (text: string): Promise<Answer> => {
        const { promise, resolve, reject } = Promise.withResolvers<Answer>();
        const again = () => {
          try {
            resolve(attempt(text));
          } catch (error) {
            const waits = error instanceof Refused && error.kind === "busy" && !(db.inTransaction && reads);
            if (waits) return void pending.set(id, again);
            reject(error);
          }
          pending.delete(id);
        };
        again();
        return promise;
      };
      return {
        id,
        send,
        async end() {
          pending.delete(id);
          db.close();
        },
      };
    },
    async waiting(ids) {
      // Those that still wait come back at the end.
      const waited = [...pending.values()];
      for (const again of waited) again();
      return new Set(ids.filter((id) => pending.has(id)));
    },
    reset: async (program) => owner.exec(resetText(program)),
    rows: async (program) => valuesOf(owner.prepare(rowsText(program)).raw().all() as unknown[][]),
    async close() {
      owner.close();
      await place.drop();
    },
  };
}
