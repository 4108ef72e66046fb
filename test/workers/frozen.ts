/** Everything once, where no built-in object can be changed: `node --frozen-intrinsics`. */
import { DatabaseSync } from "node:sqlite";
import { type Holdfast, holdfast, key, once } from "holdfast";
import { fromNodeSqlite } from "holdfast/node-sqlite";
import { queue } from "holdfast/queue";
import { quota } from "holdfast/quota";
import { stock } from "holdfast/stock";

const [client = "", url = ""] = process.argv.slice(2);

async function open(): Promise<readonly [Holdfast<unknown>, () => unknown]> {
  const options = { hazards: "warn" } as const;
  if (client === "node:sqlite") {
    const db = new DatabaseSync(url);
    return [holdfast(fromNodeSqlite(db), options), () => db.close()];
  }
  if (client === "pg") {
    const [{ Pool }, { fromPg }] = await Promise.all([import("pg"), import("holdfast/pg")]);
    const pool = new Pool({ connectionString: url });
    return [holdfast(fromPg(pool), options), () => pool.end()];
  }
  if (client === "postgres.js") {
    const [{ default: postgres }, { fromPostgres }] = await Promise.all([
      import("postgres"),
      import("holdfast/postgres"),
    ]);
    const sql = postgres(url, { onnotice: () => {} });
    return [holdfast(fromPostgres(sql), options), () => sql.end()];
  }
  const [mysql, { fromMysql2 }] = await Promise.all([import("mysql2/promise"), import("holdfast/mysql2")]);
  const pool = mysql.createPool(url);
  return [holdfast(fromMysql2(pool), options), () => pool.end()];
}

const [hf, close] = await open();
await hf.migrate();
const done: Record<string, unknown> = {};
done["lock"] = await hf.transaction({ lock: key("a") }, async (tx) => {
  await tx.lock(key("b"));
  return tx.transaction(async () => 1);
});
done["taken"] = await hf.transaction({ lock: key("a") }, () =>
  hf.outside(() =>
    hf
      .transaction({ lock: key("a"), wait: "nowait" }, async () => "entered")
      .catch((error: { code?: unknown }) => error.code),
  ),
);
const lease = await hf.lease(key("c"));
done["lease"] = lease.fence > 0;
await lease.release();
done["once"] = (await once(hf, "op", async () => 2)).value;
const uploads = quota(hf, { name: "uploads", limit: 1, per: "day" });
await uploads.consume("ada");
done["quota"] = await uploads.consume("ada").catch((error: { code?: unknown }) => error.code);
const shelf = stock(hf);
await shelf.increase("cup", 1);
done["stock"] = (await shelf.level("cup"))?.available;
const emails = queue<number>(hf, "emails");
await emails.enqueue(7);
const worked = Promise.withResolvers<number>();
const worker = emails.work(async (job) => worked.resolve(job.payload));
done["queue"] = await worked.promise;
await worker.stop();
await hf.close();
await close();
console.log(JSON.stringify(done));
