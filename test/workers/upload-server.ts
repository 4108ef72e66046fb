/** An application in a process of its own, which knows nothing of Holdfast: uploads of a user who may store 100 bytes. */
import { once } from "node:events";
import { createServer } from "node:http";
import type { AddressInfo } from "node:net";
import mysql from "mysql2/promise";
import { Pool, type PoolConfig } from "pg";
import type { WorkerContext } from "../harness/worker-protocol.ts";

type Ask = (text: string, values?: unknown[]) => Promise<Record<string, unknown>[]>;
type InTransaction = (work: (ask: Ask) => Promise<void>, how: string | null) => Promise<void>;

async function onPostgres(url: string, ssl: PoolConfig["ssl"]): Promise<InTransaction> {
  const pool = new Pool({ connectionString: url, max: 4, ssl });
  return async (work, how) => {
    const client = await pool.connect();
    const ask: Ask = async (text, values) =>
      (await client.query(text, values)).rows as Record<string, unknown>[];
    try {
      if (how === "session") {
        await ask("SELECT pg_advisory_lock(7)");
        await work(ask);
        await ask("SELECT pg_advisory_unlock(7)");
        await ask("SELECT name FROM person");
        return;
      }
      await client.query("BEGIN");
      await work(ask);
      await client.query("COMMIT");
    } catch (error) {
      await client.query(how === "session" ? "SELECT pg_advisory_unlock_all()" : "ROLLBACK");
      throw error;
    } finally {
      client.release();
    }
  };
}

async function onMysql(url: string): Promise<InTransaction> {
  const pool = mysql.createPool({ uri: url, connectionLimit: 4 });
  return async (work) => {
    const client = await pool.getConnection();
    try {
      await client.beginTransaction();
      await work(
        async (text, values) =>
          (await client.query(text.replaceAll(/\$\d/g, "?"), values))[0] as Record<string, unknown>[],
      );
      await client.commit();
    } catch (error) {
      await client.rollback();
      throw error;
    } finally {
      client.release();
    }
  };
}

async function upload(ask: Ask, how: string | null, bytes: number): Promise<void> {
  if (how === "locked") await ask("SELECT name FROM person WHERE name = 'ada' FOR UPDATE");
  const [row] = await ask("SELECT coalesce(sum(bytes), 0) AS used FROM image WHERE person = 'ada'");
  if (Number(row?.["used"]) + bytes > 100) throw new Error("The quota is used up");
  await ask("INSERT INTO image (person, bytes) VALUES ('ada', $1)", [bytes]);
}

interface Told {
  readonly url: string;
  readonly ssl?: PoolConfig["ssl"];
}

export default async function serve({ url, ssl }: Told, { send, receive }: WorkerContext) {
  const transaction = await (url.startsWith("postgres") ? onPostgres(url, ssl) : onMysql(url));
  const server = createServer((request, response) => {
    const { searchParams } = new URL(request.url ?? "", "http://localhost");
    const how = searchParams.get("how");
    transaction((ask) => upload(ask, how, Number(searchParams.get("bytes"))), how).then(
      () => response.end("stored"),
      (error: unknown) => response.writeHead(409).end(String(error)),
    );
  });
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  send("port", (server.address() as AddressInfo).port);
  await receive("stop");
}
