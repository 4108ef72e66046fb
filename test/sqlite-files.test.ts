/** SQLite files on a bad day: without WAL, full, damaged, deleted, replaced. */
import { execFile } from "node:child_process";
import { copyFile, mkdtemp, rename, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { setTimeout as sleep } from "node:timers/promises";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import { type Client, createClient } from "@libsql/client";
import { type Holdfast, holdfast, key, once, sql } from "holdfast";
import { fromLibsql } from "holdfast/libsql";
import { queue } from "holdfast/queue";
import { quota } from "holdfast/quota";
import { execute } from "holdfast/testing";
import { beforeEach, describe, expect, onTestFinished, test } from "vitest";
import { backends } from "./backends.ts";
import { bundled } from "./harness/bundled.ts";
import { placeFor } from "./harness/places.ts";
import { startWorker } from "./harness/processes.ts";
import type { WithoutWalArg } from "./workers/without-wal.ts";

const worker = (name: string) => new URL(`./workers/${name}.ts`, import.meta.url);
const lock = key("upload", 1);

let path: string;
beforeEach(async () => {
  const place = await placeFor({ server: "file" });
  path = place.url;
  return place.drop;
});

describe("libSQL without WAL", () => {
  function open(): { hf: Holdfast<Awaited<ReturnType<Client["transaction"]>>>; client: Client } {
    const client = createClient({ url: `file:${path}` });
    const hf = holdfast(fromLibsql(client), { wait: 30_000 });
    onTestFinished(async () => {
      await hf.close();
      client.close();
    });
    return { hf, client };
  }

  test("reads that met a writer keep nobody from committing afterwards", async () => {
    const { hf } = open();
    await hf.migrate();
    const uploads = quota(hf, { name: "uploads", limit: 10 });
    const reads: readonly (() => Promise<unknown>)[] = [
      () => uploads.peek("ann"),
      () => queue(hf, "errands").counts(),
      () => hf.leases(),
      () => hf.transaction({ readOnly: true }, (tx) => tx.client.execute("SELECT count(*) FROM t")),
    ];
    const writer = startWorker<string>(worker("plain-writer"), path);
    onTestFinished(() => writer.sigkill());
    await Promise.race([writer.message("inside"), writer.result]);
    const waiting = reads.map((read) => read());
    await sleep(50);
    writer.send("go on");
    await Promise.all(waiting);
    await writer.message("outside");
    for (const read of reads) await read();
    writer.send("write");
    expect(await writer.result).toBe("committed");
  });

  test("several processes side by side: each call completes, and none keeps the file", async () => {
    const { hf, client } = open();
    await hf.migrate();
    await client.execute("CREATE TABLE effect (n integer)");
    const arg: WithoutWalArg = { path, rounds: 10 };
    const crew = Array.from({ length: 3 }, () => startWorker<string[]>(worker("without-wal"), arg));
    onTestFinished(() => crew.forEach((each) => each.sigkill()));
    await Promise.all(crew.map((each) => Promise.race([each.message("idle"), each.result])));
    const writing = client.executeMultiple("BEGIN IMMEDIATE; INSERT INTO effect VALUES (0); COMMIT");
    await expect(writing).resolves.toBeUndefined();
    for (const each of crew) each.send("end");
    expect(await Promise.all(crew.map(({ result }) => result))).toEqual([[], [], []]);
    const { rows } = await client.execute("SELECT count(*) AS n FROM effect");
    expect(rows[0]?.n).toBe(3 * arg.rounds + 1);
  });
});

const files = backends.filter(({ server }) => server === "file");
const codeOf = (call: Promise<unknown>): Promise<unknown> =>
  call.then(
    () => "done",
    ({ code, message }: { code?: unknown; message: string }) => code ?? message,
  );

/** In a new file of each client, with the tables of ours. */
async function onEach<T>(
  run: (
    hf: Holdfast<unknown>,
    site: Awaited<ReturnType<(typeof files)[number]["open"]>>,
    file: string,
  ) => Promise<T>,
): Promise<Record<string, T>> {
  const results = files.map(async (backend) => {
    const place = await placeFor(backend);
    const site = await backend.open(place.url);
    // All of them run in one process.
    const hf = holdfast(site.database, { wait: 30_000 });
    try {
      await hf.migrate();
      return [backend.name, await run(hf, site, place.url)] as const;
    } finally {
      await hf.close();
      await site.close();
      await place.drop();
    }
  });
  return Object.fromEntries(await Promise.all(results));
}

const everywhere = <T>(value: T): Record<string, T> =>
  Object.fromEntries(files.map(({ name }) => [name, value]));

test("a file that was moved away, or replaced, is refused by name, and taken again once it is back", async () => {
  const found = await onEach(async (hf, _, file) => {
    const uploads = quota(hf, { name: "uploads", limit: 10 });
    const calls = () => [
      hf.transaction({ lock }, async () => {}),
      hf.transaction({ readOnly: true }, async () => {}),
      uploads.consume("ann"),
      uploads.peek("ann"),
      once(hf, "a", async () => 1),
    ];
    const codes = async () => new Set(await Promise.all(calls().map(codeOf)));
    const before = await codes();
    await rename(file, `${file}.aside`);
    // It is looked at once a second.
    await sleep(1100);
    const gone = await codes();
    await copyFile(`${file}.aside`, file);
    const replaced = await codes();
    const error: unknown = await hf.transaction({ lock }, async () => {}).catch((e: unknown) => e);
    await rename(`${file}.aside`, file);
    const isNamed = (error as { message?: string }).message?.includes(file);
    return [...before, ...gone, ...replaced, isNamed, ...(await codes())];
  });
  const refused = "HF_FILE_REPLACED";
  expect(found).toEqual(everywhere(["done", refused, refused, true, "done"]));
});

test("a COMMIT that finds no room keeps nothing, and says so in words of ours", async () => {
  const found = await onEach(async (hf, site) => {
    await execute(site, sql`CREATE VIRTUAL TABLE words USING fts5(body, content='')`);
    const [row] = await execute(site, sql`PRAGMA page_count`);
    // Its index is written at COMMIT.
    const text = Array.from({ length: 20_000 }, (_, i) => `word${i}`).join(" ");
    const write = async (tx: { readonly client: unknown }) => {
      await site.send(tx.client, `PRAGMA max_page_count = ${Number(Object.values(row ?? {})[0]) + 4}`);
      await site.send(tx.client, `INSERT INTO words (rowid, body) VALUES (1, '${text}')`);
    };
    const told = ({ code, message }: { code?: unknown; message: string }) => [code, message];
    const errors = await Promise.all([
      hf.transaction({ lock }, write).catch(told),
      once(hf, "a", write).catch(told),
    ]);
    const kept = await execute(site, sql`SELECT rowid FROM words`);
    return [...errors, kept.length];
  });
  const full = [
    "HF_SERVER_FULL",
    expect.stringMatching(/the database has no room left: .*Nothing was kept/i),
  ];
  expect(found).toEqual(everywhere([full, full, 0]));
});

test("a COMMIT that cannot write the file says so in words of ours", async ({ skip }) => {
  skip(process.platform === "win32", "there is no limit of the size of files");
  const folder = await mkdtemp(join(tmpdir(), "holdfast-limit-"));
  onTestFinished(() => rm(folder, { recursive: true, force: true }));
  const script = fileURLToPath(worker("file-limit"));
  // The signal of the limit would end the process.
  const shell = 'trap "" XFSZ; ulimit -f 4096; exec "$@"';
  const { stdout } = await promisify(execFile)("sh", [
    "-c",
    shell,
    "sh",
    process.execPath,
    ...bundled,
    script,
    folder,
  ]);
  const storage = "HF_STORAGE";
  expect(JSON.parse(stdout)).toEqual({
    "better-sqlite3": storage,
    "node:sqlite": storage,
    libsql: storage,
    duckdb: storage,
  });
});
