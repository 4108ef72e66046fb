/** Code of the pages for people who come from elsewhere, and for frameworks: every block stands alone, and has the right types. */
import { execFile } from "node:child_process";
import { mkdirSync, readFileSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { afterAll, expect, test } from "vitest";
import { root } from "./harness/command.ts";

const folders = ["docs/coming-from", "docs/frameworks"];
/** Inside of the workspace, so that its packages are found; `holdfast` as it was built. */
const place = `${root}test/node_modules/.docs-code-${process.pid}`;

afterAll(() => rmSync(place, { recursive: true, force: true }));

/** Those are one application, which test/nestjs.test.ts compiles. */
const apart = "nestjs.md";

const blocks = folders.flatMap((folder) =>
  readdirSync(root + folder)
    .filter((page) => page !== apart)
    .flatMap((page) =>
      [...readFileSync(join(root, folder, page), "utf8").matchAll(/^```(tsx?)\n(.*?)^```$/gms)].map(
        ([, kind = "ts", code = ""], i) => ({ name: `${page.replace(/\.md$/, "")}-${i + 1}.${kind}`, code }),
      ),
    ),
);

function check(files: readonly { readonly name: string; readonly code: string }[]): Promise<string> {
  rmSync(place, { recursive: true, force: true });
  mkdirSync(place, { recursive: true });
  for (const { name, code } of files) writeFileSync(join(place, name), `${code}\nexport {};\n`);
  writeFileSync(join(place, "package.json"), '{ "type": "module" }');
  const compilerOptions = {
    target: "es2024",
    lib: ["es2024", "esnext.disposable", "dom"],
    module: "nodenext",
    strict: true,
    noEmit: true,
    skipLibCheck: true,
    jsx: "preserve",
    types: ["node"],
    typeRoots: [`${root}node_modules/@types`],
  };
  writeFileSync(
    join(place, "tsconfig.json"),
    JSON.stringify({ compilerOptions, files: files.map(({ name }) => name) }),
  );
  return new Promise((resolve) =>
    execFile(process.execPath, [`${root}node_modules/typescript/bin/tsc`, "-p", place], (_, out, err) =>
      resolve(out + err),
    ),
  );
}

test("the blocks of the pages", async () => {
  expect(blocks.length).toBeGreaterThan(12);
  expect(await check(blocks)).toBe("");
}, 120_000);

test("a block that is wrong is found", async () => {
  const code = 'import { queue } from "holdfast/queue";\nqueue({}, "emails").enqueue({}, { delay: 5 });\n';
  expect(await check([{ name: "wrong.ts", code }])).toContain(
    "'delay' does not exist in type 'EnqueueOptions'",
  );
}, 120_000);
