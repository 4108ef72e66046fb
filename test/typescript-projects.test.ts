/** Settings of TypeScript that docs/frameworks/typescript.md names: a project is compiled with each, and what came out is run. */
import { execFile } from "node:child_process";
import { mkdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import { afterAll, describe, expect, test } from "vitest";
import { root } from "./harness/command.ts";

/** Inside of the workspace, so that its packages are found; `holdfast` as it was built. */
const place = `${root}test/node_modules/.typescript-${process.pid}`;
afterAll(() => rmSync(place, { recursive: true, force: true }));

const oldest = {
  name: "TypeScript 5.5",
  path: createRequire(`${root}older/clients.ts`).resolve("typescript/bin/tsc"),
};
const newest = { name: "the newest TypeScript", path: `${root}node_modules/typescript/bin/tsc` };

const code = `
import { type Holdfast, holdfast, key } from "holdfast";
import { HoldfastModule } from "holdfast/nestjs";
import { fromPg } from "holdfast/pg";
import { queue } from "holdfast/queue";
import { quota } from "holdfast/quota";
import { expectNoRace } from "holdfast/testing";
import { Pool, type PoolClient } from "pg";

const pool = new Pool();
const hf: Holdfast<PoolClient> = holdfast(fromPg(pool));
const uploads = quota(hf, { name: "uploads", limit: 3, per: "1 day" });
const emails = queue<{ to: string }>(hf, "emails");
export async function upload(user: string): Promise<void> {
  await using lease = await hf.lease(key("upload", user), { ttl: 1000 });
  await uploads.consume(user, 1);
  await hf.lock(key("album", user), async (tx) => {
    lease.throwIfLost();
    await tx.client.query("SELECT 1");
    await emails.enqueue({ to: user }, { tx });
  });
}
// @ts-expect-error: the types are there.
export const wrong = () => emails.enqueue({ too: "ada" });
console.log([HoldfastModule.forRoot({ holdfast: hf }).global, typeof expectNoRace].join());
`;

interface Run {
  readonly code: number;
  readonly output: string;
}

const run = (cwd: string, args: readonly string[]): Promise<Run> =>
  new Promise((resolve) =>
    execFile(process.execPath, args, { cwd }, (error, out, err) =>
      resolve({ code: typeof error?.code === "number" ? error.code : error ? 1 : 0, output: out + err }),
    ),
  );

async function project(
  tsc: typeof oldest,
  type: "module" | "commonjs",
  settings: object,
): Promise<Run & { path: string }> {
  const path = join(place, String(Math.random()).slice(2));
  mkdirSync(path, { recursive: true });
  writeFileSync(join(path, "package.json"), JSON.stringify({ type }));
  writeFileSync(join(path, "index.ts"), code);
  const compilerOptions = {
    target: "es2022",
    lib: ["es2023", "esnext.disposable"],
    strict: true,
    types: ["node"],
    typeRoots: [`${root}node_modules/@types`],
    // Of @types/pg and others: not ours.
    skipLibCheck: true,
    ...settings,
  };
  writeFileSync(join(path, "tsconfig.json"), JSON.stringify({ compilerOptions, files: ["index.ts"] }));
  return { path, ...(await run(path, [tsc.path, "-p", path])) };
}

const esm = [{ module: "nodenext" }, { module: "esnext", moduleResolution: "bundler" }] as const;

describe.each([
  ...esm.flatMap((settings) => [oldest, newest].map((tsc) => ({ tsc, type: "module" as const, settings }))),
  { tsc: oldest, type: "module" as const, settings: { module: "node16" } },
  { tsc: newest, type: "module" as const, settings: { module: "preserve", moduleResolution: "bundler" } },
  ...[oldest, newest].map((tsc) => ({ tsc, type: "commonjs" as const, settings: { module: "commonjs" } })),
  { tsc: newest, type: "commonjs" as const, settings: { module: "nodenext" } },
])("$tsc.name, $settings in a project of $type", ({ tsc, type, settings }) => {
  test("is compiled, and runs", async () => {
    const { path, ...compiled } = await project(tsc, type, settings);
    expect(compiled).toEqual({ code: 0, output: "" });
    const written = readFileSync(join(path, "index.js"), "utf8");
    expect(written.includes('require("holdfast")')).toBe(type === "commonjs");
    expect(await run(path, ["index.js"])).toEqual({ code: 0, output: "true,function\n" });
  }, 120_000);
});

test("what does not work is refused by the compiler, and not at run time", async () => {
  const { code: exit, output } = await project(oldest, "commonjs", { module: "node16" });
  expect(exit).not.toBe(0);
  expect(output).toContain("TS1479");
}, 120_000);

test("resolution without `exports` finds the types of every subpath", () => {
  const library = JSON.parse(readFileSync(`${root}packages/holdfast/package.json`, "utf8"));
  const types = Object.entries<{ types?: string } | string>(library.exports).flatMap(([path, target]) =>
    typeof target === "object" && path !== "." ? [[path.slice(2), [target.types]]] : [],
  );
  expect(library.typesVersions).toEqual({ "*": Object.fromEntries(types) });
  expect(library.types).toBe(library.exports["."].types);
});
