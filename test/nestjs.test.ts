/** The application of docs/frameworks/nestjs.md, compiled to CommonJS by the oldest TypeScript, and run. */
import { type ChildProcess, execFile, spawn } from "node:child_process";
import { once } from "node:events";
import { mkdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { dirname, join } from "node:path";
import { HoldfastError, holdfast } from "holdfast";
import { HoldfastFilter, HoldfastHealth, HoldfastModule, Limit, problemOf } from "holdfast/nestjs";
import { fromPg } from "holdfast/pg";
import { queue } from "holdfast/queue";
import { Pool } from "pg";
import { afterAll, beforeAll, expect, test } from "vitest";
import { root } from "./harness/command.ts";
import { type TestDatabase, createDatabase } from "./harness/databases.ts";
import { eventually } from "./harness/wait.ts";

/** Inside of the workspace, so that its packages are found; `holdfast` as it was built. */
const place = `${root}test/node_modules/.nestjs-${process.pid}`;
let database: TestDatabase;
let pool: Pool;

beforeAll(async () => {
  database = await createDatabase("postgres");
  pool = new Pool({ connectionString: database.url, max: 2 });
});
afterAll(async () => {
  rmSync(place, { recursive: true, force: true });
  await pool?.end();
  await database?.drop();
});

async function compile(): Promise<string> {
  const page = readFileSync(`${root}docs/frameworks/nestjs.md`, "utf8");
  for (const [, file = "", code = ""] of page.matchAll(/^```ts\n\/\/ (src\/\S+)\n(.*?)^```$/gms)) {
    mkdirSync(dirname(join(place, file)), { recursive: true });
    writeFileSync(join(place, file), code);
  }
  writeFileSync(join(place, "package.json"), "{}");
  writeFileSync(
    join(place, "tsconfig.json"),
    // As `nest new` writes it.
    JSON.stringify({
      compilerOptions: {
        module: "commonjs",
        target: "ES2023",
        strict: true,
        experimentalDecorators: true,
        emitDecoratorMetadata: true,
        esModuleInterop: true,
        skipLibCheck: true,
        types: ["node"],
        typeRoots: [`${root}node_modules/@types`],
        outDir: "dist",
        rootDir: "src",
      },
      include: ["src"],
    }),
  );
  const tsc = createRequire(`${root}older/clients.ts`).resolve("typescript/bin/tsc");
  return new Promise((resolve) =>
    execFile(process.execPath, [tsc, "-p", place], (_, out, err) => resolve(out + err)),
  );
}

async function started(): Promise<{ child: ChildProcess; url: string; errors: () => string }> {
  const child = spawn(process.execPath, ["dist/main.js"], {
    cwd: place,
    env: { PATH: process.env["PATH"], DATABASE_URL: database.url, PORT: "0" },
    stdio: ["ignore", "pipe", "pipe"],
  });
  let [out, err] = ["", ""];
  child.stdout.on("data", (chunk) => (out += String(chunk)));
  child.stderr.on("data", (chunk) => (err += String(chunk)));
  const url = await eventually(
    () => {
      if (child.exitCode !== null) throw new Error(err);
      return /^http:\S+/m.exec(out)?.[0] ?? false;
    },
    { timeout: 60_000 },
  );
  return { child, url: url as string, errors: () => err };
}

test("CommonJS: limits, the instance, workers, health, and an end that waits", async () => {
  expect(await compile()).toBe("");
  expect(readFileSync(join(place, "dist/app.module.js"), "utf8")).toContain('require("holdfast/nestjs")');
  const { child, url, errors } = await started();
  try {
    const post = async (path: string, user = "ada") => {
      const response = await fetch(url + path, { method: "POST", headers: { "x-user": user } });
      return { status: response.status, fields: response.headers, text: await response.text() };
    };
    const five = await Promise.all(Array.from({ length: 5 }, () => post("/uploads")));
    expect(five.map(({ status }) => status).toSorted((a, b) => a - b)).toEqual([201, 201, 201, 429, 429]);
    const refused = five.find(({ status }) => status === 429);
    expect(JSON.parse(refused?.text ?? "")).toMatchObject({ status: 429, title: expect.any(String) });
    expect(refused?.fields.get("ratelimit")).toMatch(/^"uploads";r=0/);
    expect((await post("/uploads", "bob")).status).toBe(201);
    expect((await post("/exports")).status).toBe(201);
    expect((await post("/exports")).status).toBe(429);
    const health = await fetch(`${url}/health`);
    expect([health.status, await health.json()]).toMatchObject([
      200,
      { status: "ok", info: { database: { status: "up" } } },
    ]);
    expect(await (await fetch(`${url}/health/plain`)).json()).toMatchObject({ status: "up" });
    const emails = queue<{ to: string }>(holdfast(fromPg(pool)), "emails");
    await emails.enqueue({ to: "ada" });
    await eventually(async () => {
      const { waiting, running } = await emails.counts();
      expect(waiting + running).toBe(0);
    });
    child.kill("SIGTERM");
    if (child.exitCode === null && child.signalCode === null) await once(child, "exit");
    // Nest sends itself the signal again when all has ended.
    expect([child.signalCode ?? child.exitCode, errors()]).toEqual(["SIGTERM", ""]);
    const { rows } = await pool.query("SELECT count(*)::int AS n FROM holdfast.queue_worker");
    expect(rows).toEqual([{ n: 0 }]);
  } finally {
    child.kill("SIGKILL");
  }
}, 180_000);

/** Of every code: what a request is answered with, as docs/errors.md has it; of the rest nothing, so that Nest answers 500. */
test("errors and their answers", async () => {
  await import("reflect-metadata");
  const [, listed = ""] =
    /## As answers over HTTP\n([\s\S]*?)\n## /.exec(readFileSync(`${root}docs/errors.md`, "utf8")) ?? [];
  const rows = [...listed.matchAll(/^\| (\d+)( and `Retry-After`)? +\| (.*) \|$/gm)];
  const documented = new Map(
    rows.flatMap(([, status, again, codes = ""]) =>
      [...codes.matchAll(/HF_\w+/g)].map(([code]) => [
        code,
        { status: Number(status), again: again !== undefined },
      ]),
    ),
  );
  expect(documented.size).toBeGreaterThan(25);
  const all = new Set(readFileSync(`${root}docs/errors.md`, "utf8").match(/HF_[A-Z_]+/g));
  expect(all.size).toBeGreaterThan(50);
  const filter = new HoldfastFilter();
  const metadata = Reflect as unknown as { getMetadata(name: string, of: object): (new () => unknown)[] };
  const [caught] = metadata.getMetadata("__filterCatchExceptions__", HoldfastFilter);
  for (const code of all) {
    const error = new HoldfastError(code, "secret of ada", {});
    const found = problemOf(new Error("wrapped", { cause: error }));
    expect([code, found?.status]).toEqual([code, documented.get(code)?.status]);
    expect([code, error instanceof (caught as never)]).toEqual([code, found !== undefined]);
    if (!found) continue;
    expect([code, "Retry-After" in found.headers]).toEqual([code, documented.get(code)?.again]);
    expect(JSON.stringify(found)).not.toContain("secret");
    const sent: unknown[] = [];
    const note = (...what: unknown[]) => sent.push(what);
    const response = { status: note, header: note, send: note };
    filter.catch(error, {
      getType: () => "http",
      switchToHttp: () => ({ getRequest: () => ({}), getResponse: () => response }),
    });
    expect(sent[0]).toEqual([found.status]);
    expect(sent.at(-1)).toEqual([found.body]);
  }
  expect(problemOf(new Error("mine"))).toBeUndefined();
  expect(new Error("mine") instanceof (caught as never)).toBe(false);
});

test("what is wrong is said: no instance, no HttpException; a database that is away is down", async () => {
  expect(() => HoldfastModule.forRoot({ holdfast: {} as never })).toThrow("`holdfast` is an instance");
  expect(() => HoldfastModule.forRoot({ hf: {} } as never)).toThrow("hf");
  const nowhere = new Pool({ host: "127.0.0.1", port: 1 });
  const hf = holdfast(fromPg(nowhere));
  const health = new HoldfastHealth(hf);
  expect(await health.isHealthy("db")).toMatchObject({ db: { status: "down", message: expect.any(String) } });
  await hf.close();
  await nowhere.end();
  await import("reflect-metadata");
  const handler = (): void => {};
  Limit(() => ({}) as never, { subject: () => "ada" })({}, "handler", { value: handler });
  const [guard] = (Reflect as unknown as { getMetadata(name: string, of: object): any[] }).getMetadata(
    "__guards__",
    handler,
  );
  expect(() => new guard({ holdfast: hf })).toThrow("HoldfastModule needs `HttpException`");
});
