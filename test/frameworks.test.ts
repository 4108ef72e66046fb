/** The applications of docs/frameworks, as they stand on their pages, in a process of their own: asked over HTTP, and ended. */
import { type ChildProcess, spawn } from "node:child_process";
import { once } from "node:events";
import { mkdirSync, rmSync, writeFileSync } from "node:fs";
import { stripTypeScriptTypes } from "node:module";
import { join } from "node:path";
import { holdfast, key } from "holdfast";
import { fromPg } from "holdfast/pg";
import { Pool } from "pg";
import { afterAll, beforeAll, expect, test } from "vitest";
import { blocksOf } from "./docs/markdown.ts";
import { root } from "./harness/command.ts";
import { type TestDatabase, createDatabase } from "./harness/databases.ts";
import { eventually } from "./harness/wait.ts";

/** Inside of the workspace, so that its packages are found; `holdfast` as it was built. */
const place = `${root}test/node_modules/.frameworks-${process.pid}`;
let database: TestDatabase;
let pool: Pool;

beforeAll(async () => {
  database = await createDatabase("postgres");
  pool = new Pool({ connectionString: database.url, max: 2 });
  await holdfast(fromPg(pool)).migrate();
  await pool.query("CREATE TABLE image (user_id text NOT NULL)");
  mkdirSync(place, { recursive: true });
});
afterAll(async () => {
  rmSync(place, { recursive: true, force: true });
  await pool?.end();
  await database?.drop();
});

/** Where each listens, and what it says when all is well. */
const pages = {
  express: { block: 0, names: "server", path: "/uploads", status: 201 },
  fastify: { block: 0, names: "app", path: "/uploads", status: 200 },
  hono: { block: 0, names: "app", path: "/uploads/image", status: 201 },
  nextjs: { block: 1, names: "", path: "/uploads", status: 201 },
};

/** Their limit is 100, and their port 3000. The rest is as it is. */
function write(page: keyof typeof pages): void {
  const { block, names } = pages[page];
  const code = blocksOf(`docs/frameworks/${page}.md`).filter(({ language }) => language === "ts")[block]
    ?.code;
  const own = code?.replace("limit: 100", "limit: 10").replaceAll("3000", "0");
  expect(own).toContain("limit: 10,");
  // Whoever runs these two ends them as well: without it, the connections that are idle are waited for.
  const ended = own?.replace("fromPg(new Pool())", "fromPg(new Pool({ allowExitOnIdle: true }))");
  writeFileSync(
    join(place, `${page}.mjs`),
    `${stripTypeScriptTypes(ended ?? "")}\nexport { ${names.replace(/.+/, "$& as listening")} };\n`,
  );
}

/** Hono and Next.js are handed requests by what they run in: here, by a server that does nothing else. */
const main = `import { createServer } from "node:http";
import * as express from "./express.mjs";
import * as fastify from "./fastify.mjs";
import * as hono from "./hono.mjs";
import * as nextjs from "./nextjs.mjs";

const servers = [];
async function serve(handler) {
  const server = createServer(async ({ url, method, headers }, res) => {
    const answer = await handler(new Request("http://localhost" + url, { method, headers }));
    res.writeHead(answer.status, [...answer.headers].flat()).end(await answer.text());
  });
  servers.push(server);
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  return server.address().port;
}
console.log("ports " + JSON.stringify({
  express: express.listening.address().port,
  fastify: fastify.listening.server.address().port,
  hono: await serve((request) => hono.default.fetch(request)),
  nextjs: await serve((request) => nextjs.POST(request)),
}));
process.once("SIGTERM", () => servers.forEach((server) => server.close()));
`;

async function started(): Promise<{ child: ChildProcess; out: () => string; errors: () => string }> {
  const { hostname, port, username, password } = new URL(database.url);
  const child = spawn(process.execPath, ["main.mjs"], {
    cwd: place,
    env: {
      PATH: process.env["PATH"],
      PGHOST: hostname,
      PGPORT: port,
      PGUSER: username,
      PGPASSWORD: password,
      PGDATABASE: database.name,
    },
    stdio: ["ignore", "pipe", "pipe"],
  });
  let [out, err] = ["", ""];
  child.stdout.on("data", (chunk) => (out += String(chunk)));
  child.stderr.on("data", (chunk) => (err += String(chunk)));
  return { child, out: () => out, errors: () => err };
}

test("Express, Fastify, Hono, Next.js: ten of fifteen are let in, and the process ends when it is told to", async () => {
  const names = Object.keys(pages) as (keyof typeof pages)[];
  names.forEach(write);
  writeFileSync(join(place, "main.mjs"), main);
  const { child, out, errors } = await started();
  try {
    const said = await eventually(
      () => {
        if (child.exitCode !== null) throw new Error(errors());
        return /^ports (.*)$/m.exec(out())?.[1] ?? false;
      },
      { timeout: 60_000 },
    );
    const ports = JSON.parse(said as string) as Record<keyof typeof pages, number>;
    for (const name of names) {
      const { path, status } = pages[name];
      const ask = async (): Promise<Response> =>
        fetch(`http://127.0.0.1:${ports[name]}${path}`, { method: "POST", headers: { "x-user": name } });
      const answers = await Promise.all(Array.from({ length: 15 }, ask));
      const statuses = answers.map((answer) => answer.status).toSorted((a, b) => a - b);
      expect([name, ...statuses]).toEqual([name, ...Array(10).fill(status), ...Array(5).fill(429)]);
      const refused = answers.find((answer) => answer.status === 429);
      expect(Number(refused?.headers.get("retry-after"))).toBeGreaterThan(0);
      const { rows } = await pool.query("SELECT count(*)::int AS n FROM image WHERE user_id = $1", [name]);
      expect(rows).toEqual([{ n: 10 }]);
    }
    // A lock that is not free in time is no 500.
    const others = holdfast(fromPg(pool));
    const late = await others.transaction({ lock: names.map((name) => key("album", `${name}-late`)) }, () =>
      others.outside(() =>
        Promise.all(
          names.map(async (name) => {
            const headers = { "x-user": `${name}-late` };
            const answer = await fetch(`http://127.0.0.1:${ports[name]}${pages[name].path}`, {
              method: "POST",
              headers,
            });
            return { name, answer, problem: await answer.json() };
          }),
        ),
      ),
    );
    await others.close();
    for (const { name, answer, problem } of late) {
      expect([name, answer.status, answer.headers.get("retry-after")]).toEqual([name, 503, "1"]);
      expect(answer.headers.get("content-type")).toMatch(/^application\/problem\+json/);
      expect(problem).toMatchObject({ status: 503, code: "HF_LOCK_TIMEOUT" });
      expect(JSON.stringify(problem)).not.toContain("album");
    }
    // What was enqueued with a row is worked off, once.
    await eventually(() => out().match(/^express$/gm)?.length === 10, { timeout: 60_000 });
  } finally {
    const ended = once(child, "exit");
    if (child.exitCode === null) {
      child.kill("SIGTERM");
      await ended;
    }
  }
  expect([child.exitCode, child.signalCode, errors()]).toEqual([0, null, ""]);
});
