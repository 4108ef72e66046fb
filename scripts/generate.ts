/** Generates the Prisma clients of tests and examples. Prisma's schema engine is not needed for that, and is not downloaded. */
import { spawnSync } from "node:child_process";
import { fileURLToPath } from "node:url";

for (const folder of ["test/prisma", "test/prisma-mysql", "test/prisma-sqlite", "examples/prisma"]) {
  const { status } = spawnSync("prisma", ["generate"], {
    cwd: fileURLToPath(new URL(`../${folder}`, import.meta.url)),
    env: {
      ...process.env,
      PRISMA_SCHEMA_ENGINE_BINARY: "/bin/true",
      CHECKPOINT_DISABLE: "1",
      PRISMA_HIDE_UPDATE_MESSAGE: "1",
    },
    stdio: "inherit",
  });
  if (status !== 0) process.exitCode = status ?? 1;
}
