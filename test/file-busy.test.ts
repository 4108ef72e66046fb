/** SQLite between processes: a key is called taken if its holder is known, and else the file is called busy. */
import { chmod, mkdtemp, readdir, rm, stat, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { DatabaseSync } from "node:sqlite";
import { type Holdfast, holdfast, key, once } from "holdfast";
import { afterEach, beforeEach, describe, expect, test } from "vitest";
import { backendNamed } from "./backends.ts";
import { type Worker, startWorker } from "./harness/processes.ts";
import { eventually } from "./harness/wait.ts";
import type { FileWriterArg } from "./workers/file-writer.ts";

const fileWriter = new URL("./workers/file-writer.ts", import.meta.url);
const busy = { code: "HF_FILE_BUSY", retryable: true };
const never = async () => expect.unreachable("it entered");

let folder: string;
let url: string;
let site: Awaited<ReturnType<ReturnType<typeof backendNamed>["open"]>>;
let hf: Holdfast<unknown>;
const workers: Worker[] = [];

async function open(backend: string): Promise<void> {
  site = await backendNamed(backend).open(url);
  hf = holdfast(site.database);
  await hf.migrate();
}

async function started(backend: string, how: FileWriterArg["how"], name = "mine"): Promise<Worker> {
  const worker = startWorker(fileWriter, { backend, url, how, key: name } satisfies FileWriterArg);
  workers.push(worker);
  await Promise.race([worker.message("inside"), worker.result]);
  return worker;
}

async function ended(worker: Worker): Promise<void> {
  worker.send("go on");
  await worker.result;
  await worker.exited;
}

async function killed(worker: Worker): Promise<void> {
  worker.sigkill();
  await worker.exited;
}

beforeEach(async () => {
  folder = await mkdtemp(join(tmpdir(), "holdfast-busy-"));
  url = join(folder, "test.db");
});
afterEach(async () => {
  for (const worker of workers.splice(0)) await killed(worker);
  await hf.close();
  await site.close();
  await rm(folder, { recursive: true, force: true });
});

describe.each(["better-sqlite3", "node:sqlite", "libsql", "Knex on SQLite"])("%s", (backend) => {
  beforeEach(() => open(backend));

  test("an unrelated writer has no key", async () => {
    const writer = await started(backend, "raw");
    const lock = key("mine");
    for (const call of [
      () => hf.tryLock(lock, never),
      () => hf.transaction({ lock, wait: "nowait" }, never),
      () => hf.transaction({ lock, wait: 30 }, never),
      () => once(hf, "mine", never, { wait: "skip" }),
      () => hf.lease(lock, { wait: "skip" }),
    ])
      await expect<Promise<unknown>>(call()).rejects.toMatchObject(busy);
    await ended(writer);
    expect(await hf.tryLock(lock, async () => 1)).toEqual({ acquired: true, value: 1 });
  });

  test("a holder's key is taken, and no other one", async () => {
    const hows = ["lock", "later", "once", "blocked"] as const;
    for (const how of hows) {
      const holder = await started(backend, how, how);
      if (how === "once") {
        expect(await once(hf, how, never, { wait: "skip" })).toEqual({ status: "in progress" });
      } else {
        expect(await hf.tryLock(key(how), never)).toEqual({ acquired: false });
        const waiting = hf.transaction({ lock: [key("free"), key(how)], wait: 30 }, never);
        await expect(waiting).rejects.toMatchObject({ code: "HF_LOCK_TIMEOUT" });
      }
      const other = hf.transaction({ lock: key("not", how), wait: 30 }, never);
      await expect(other).rejects.toMatchObject(busy);
      await killed(holder);
    }
  });

  test("the key of a holder that was killed is free, whoever writes then", async () => {
    const holder = await started(backend, "lock");
    expect(await hf.tryLock(key("mine"), never)).toEqual({ acquired: false });
    // A holder that is frozen holds still.
    holder.sigstop();
    expect(await hf.tryLock(key("mine"), never)).toEqual({ acquired: false });
    await killed(holder);
    const writer = await started(backend, "raw");
    await expect(hf.tryLock(key("mine"), never)).rejects.toMatchObject(busy);
    await ended(writer);
    expect(await hf.tryLock(key("mine"), async () => 1)).toEqual({ acquired: true, value: 1 });
  });

  test("where nothing can be written beside the file, a key is never called taken between processes", async () => {
    await writeFile(`${url}-holdfast`, "in the way");
    const holder = await started(backend, "lock");
    await expect(hf.tryLock(key("mine"), never)).rejects.toMatchObject(busy);
    await ended(holder);
    expect(await hf.tryLock(key("mine"), async () => 1)).toEqual({ acquired: true, value: 1 });
  });
});

describe.each(["better-sqlite3", "node:sqlite", "libsql"])("%s", (backend) => {
  beforeEach(() => open(backend));

  test("a key is taken by a transaction of the caller's own, until its end", async () => {
    const holder = await started(backend, "join");
    expect(await hf.tryLock(key("mine"), never)).toEqual({ acquired: false });
    await ended(holder);
    expect(await hf.tryLock(key("mine"), async () => 1)).toEqual({ acquired: true, value: 1 });
  });
});

test("processes with different clients read each other's keys, and leave nothing behind", async () => {
  await open("better-sqlite3");
  for (const backend of ["node:sqlite", "libsql"]) {
    const holder = await started(backend, "lock");
    expect(await hf.tryLock(key("mine"), never)).toEqual({ acquired: false });
    await ended(holder);
  }
  const first = await started("node:sqlite", "lock");
  expect(await readdir(`${url}-holdfast`)).toHaveLength(2);
  await killed(first);
  // Whoever publishes next removes what the dead have left.
  const second = await started("node:sqlite", "lock");
  await eventually(async () => expect(await readdir(`${url}-holdfast`)).toHaveLength(2));
  await ended(second);
  expect(await readdir(folder)).not.toContain("test.db-holdfast");
});

test("a handle that is opened while nobody may even read waits as the others do", async () => {
  await open("node:sqlite");
  // Without WAL.
  const path = join(folder, "plain.db");
  using writer = new DatabaseSync(path);
  writer.exec("CREATE TABLE t (n integer); BEGIN EXCLUSIVE");
  const worker = startWorker<string>(new URL("./workers/file-waiter.ts", import.meta.url), path);
  workers.push(worker);
  await Promise.race([worker.message("waiting"), worker.result]);
  writer.exec("ROLLBACK");
  expect(await worker.result).toBe("entered");
});

test("files beside the database are as open as it is", async () => {
  await open("node:sqlite");
  await chmod(url, 0o660);
  await hf.transaction({ lock: key("mine") }, async () => {
    const names = await readdir(`${url}-holdfast`);
    expect(new Set(names.map((name) => name.split(".")[1]))).toEqual(new Set(["keys", "lock"]));
    const mode = async (path: string) => (await stat(path)).mode & 0o777;
    expect(await mode(`${url}-holdfast`)).toBe(0o770);
    for (const name of names) expect(await mode(join(`${url}-holdfast`, name))).toBe(0o660);
  });
});
