/** The library inside of a bundle: as CommonJS, where `import.meta` is empty, and in workerd (Cloudflare Workers). */
import { execFile, spawn } from "node:child_process";
import { once } from "node:events";
import { copyFileSync, mkdirSync, mkdtempSync, readFileSync, rmSync, symlinkSync } from "node:fs";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { createInterface } from "node:readline";
import type { Readable } from "node:stream";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import { type BuildOptions, build } from "esbuild";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";
import type { Found } from "./bundles/exact.ts";
import { type TestDatabase, createDatabase, unavailable } from "./harness/databases.ts";

const here = fileURLToPath(new URL("bundles/", import.meta.url));
const missing = unavailable("postgres");

let folder: string;
let database: TestDatabase;

beforeAll(() => {
  folder = mkdtempSync(join(tmpdir(), "holdfast-bundle-"));
});

afterAll(() => rmSync(folder, { recursive: true, force: true }));

/** Of the sources, with everything in it. */
async function bundle(options: BuildOptions): Promise<void> {
  await build({
    bundle: true,
    logLevel: "silent",
    platform: "node",
    target: "node22",
    conditions: ["holdfast-source"],
    external: ["pg-native"],
    ...options,
  });
}

const run = promisify(execFile);

describe("CommonJS", () => {
  test("has every part of the library, and can be loaded", async () => {
    const manifest = JSON.parse(
      readFileSync(new URL("../packages/holdfast/package.json", import.meta.url), "utf8"),
    ) as { exports: Record<string, unknown> };
    const names = Object.keys(manifest.exports)
      .filter((name) => !name.endsWith(".json"))
      .map((name) => name.replace(".", "holdfast"));
    expect(names.length).toBeGreaterThan(25);
    const outfile = join(folder, "everything.cjs");
    await bundle({
      stdin: {
        contents: names.map((name, i) => `export * as part${i} from ${JSON.stringify(name)};`).join("\n"),
        resolveDir: here,
      },
      format: "cjs",
      outfile,
    });
    const { stdout } = await run(process.execPath, [
      "--eval",
      `console.log(Object.values(require(${JSON.stringify(outfile)})).map((part) => Object.keys(part).length > 0).join())`,
    ]);
    expect(stdout.trim()).toBe(names.map(() => "true").join());
  });

  test.each([
    ["where the bundle is", {}],
    // As Turbopack has it, in builds of Next.js.
    ["where the program is, if the bundle does not know its own place", { __filename: '"/ROOT/self.js"' }],
  ])("cron patterns find the package croner from %s", async (_, define) => {
    const outfile = join(folder, "cron.cjs");
    rmSync(join(folder, "node_modules"), { recursive: true, force: true });
    mkdirSync(join(folder, "node_modules"));
    const croner = createRequire(import.meta.url).resolve("croner/package.json");
    symlinkSync(dirname(croner), join(folder, "node_modules/croner"));
    await bundle({
      stdin: {
        contents: `import { nextRuns } from "holdfast/schedule";
          nextRuns({ cron: "0 3 * * *" }, 1, new Date(0)).then(([at]) => console.log(at.toISOString()));`,
        resolveDir: here,
      },
      format: "cjs",
      outfile,
      define,
    });
    const { stdout } = await run(process.execPath, [outfile], { cwd: tmpdir() });
    expect(stdout.trim()).toBe("1970-01-01T03:00:00.000Z");
  });
});

const expected: Found = {
  granted: 10,
  used: 10,
  counted: 10,
  waiting: 1,
  onHand: 3,
  next: "1970-01-01T01:00:00.000Z",
};

describe("an exact quota", () => {
  beforeEach(async ({ skip }) => {
    skip(missing !== undefined, missing);
    database = await createDatabase("postgres");
    return () => database.drop();
  });

  test("in a bundle for CommonJS", async () => {
    const outfile = join(folder, "app.cjs");
    await bundle({ entryPoints: [join(here, "node.ts")], format: "cjs", outfile });
    const { stdout } = await run(process.execPath, [outfile], {
      cwd: folder,
      env: { ...process.env, DATABASE_URL: database.url },
    });
    expect(JSON.parse(stdout)).toEqual(expected);
  });

  test("in workerd", async () => {
    await bundle({
      entryPoints: [join(here, "workerd.ts")],
      conditions: ["workerd", "holdfast-source"],
      format: "esm",
      outfile: join(folder, "worker.js"),
      external: ["cloudflare:*", "pg-native"],
      // What pg requires is the runtime's own.
      banner: {
        js: `import { createRequire as requireOf } from "node:module"; const require = requireOf("/");`,
      },
    });
    copyFileSync(join(here, "workerd.capnp"), join(folder, "workerd.capnp"));
    const program = (createRequire(import.meta.url)("workerd") as { default: string }).default;
    const server = spawn(program, ["serve", "workerd.capnp", "--control-fd=3"], {
      cwd: folder,
      env: { ...process.env, DATABASE_URL: database.url },
      stdio: ["ignore", "inherit", "inherit", "pipe"],
    });
    try {
      const port = await listening(server.stdio[3] as Readable, once(server, "exit"));
      const response = await fetch(`http://127.0.0.1:${port}/`);
      const text = await response.text();
      expect(response.status, text).toBe(200);
      expect(JSON.parse(text)).toEqual(expected);
    } finally {
      server.kill();
      if (server.exitCode === null && server.signalCode === null) await once(server, "exit");
    }
  });
});

/** It says on which port, in a line of JSON. */
async function listening(said: Readable, ended: Promise<unknown>): Promise<number> {
  for await (const line of createInterface(said)) {
    const event = JSON.parse(line) as { event: string; socket?: string; port?: number };
    if (event.event === "listen" && event.socket === "http" && event.port) return event.port;
  }
  await ended;
  throw new Error("workerd ended before it listened");
}
