/** A server in Python, which the command holds back in its proxy. */
import assert from "node:assert/strict";
import type { RaceContext, RaceScenario } from "@holdfast/cli";
import { fromPg } from "holdfast/pg";
import { Pool } from "pg";
import { startUploads } from "../../harness/python.ts";

const uploads =
  (how: string) =>
  async ({ url, proxy = "" }: RaceContext): Promise<RaceScenario> => {
    const pool = new Pool({ connectionString: url });
    await pool.query(`
      CREATE TABLE IF NOT EXISTS person (name text PRIMARY KEY);
      CREATE TABLE IF NOT EXISTS image (person text REFERENCES person, bytes int NOT NULL);
      INSERT INTO person VALUES ('ada') ON CONFLICT DO NOTHING`);
    const server = await startUploads(proxy);
    const upload = async () => (await fetch(`http://127.0.0.1:${server.port}/?bytes=60&how=${how}`)).text();
    return {
      db: fromPg(pool),
      actors: { A: upload, B: upload },
      invariant: async () => {
        const { rows } = await pool.query<{ used: number }>(
          "SELECT coalesce(sum(bytes), 0)::int AS used FROM image",
        );
        assert.ok((rows[0]?.used ?? 0) <= 100, "more than 100 bytes");
      },
      close: async () => {
        server.stop();
        await pool.end();
      },
    };
  };

export const naive = uploads("naive");
export const locked = uploads("locked");
