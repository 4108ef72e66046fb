/** `client file times`: when it is told to, adds 1 so many times, by a read and a write. `client file hold`: stays inside of one. */
import { once } from "node:events";
import { DatabaseSync } from "node:sqlite";
import Sqlite from "better-sqlite3";
import { type Holdfast, holdfast, key } from "holdfast";
import { fromBetterSqlite3 } from "holdfast/better-sqlite3";
import { fromNodeSqlite } from "holdfast/node-sqlite";

const [client = "", file = "", times = ""] = process.argv.slice(2);
const hf = (client.startsWith("better")
  ? holdfast(fromBetterSqlite3(client.endsWith("handles") ? () => new Sqlite(file) : new Sqlite(file)))
  : holdfast(
      fromNodeSqlite(client.endsWith("handles") ? () => new DatabaseSync(file) : new DatabaseSync(file)),
    )) as unknown as Holdfast<DatabaseSync>;

if (times === "hold")
  hf.transactionSync({ lock: key("counter") }, ({ client: db }) => {
    db.exec("UPDATE counter SET n = n + 1");
    process.send?.("inside");
    Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 60_000);
  });

process.send?.("ready");
await once(process, "message");
for (let i = 0; i < Number(times); i++)
  hf.transactionSync({ lock: key("counter"), wait: 60_000 }, ({ client: db }) => {
    const { n } = db.prepare("SELECT n FROM counter").get() as { n: number };
    db.prepare("UPDATE counter SET n = ?").run(n + 1);
  });
await hf.close();
process.disconnect?.();
