/** Makes the pages of docs/ a site: `build` writes it, `preview` serves what was built, `dev` serves it and follows changes. */
import { watch } from "node:fs";
import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";
import { build, createServer, serve } from "vitepress";
import { prepare, prepareDocs } from "./prepare/index.ts";

const site = fileURLToPath(new URL(".", import.meta.url));
const { positionals, values } = parseArgs({
  allowPositionals: true,
  options: { port: { type: "string", default: "5173" } },
});
const [verb = "build"] = positionals;
const port = Number(values.port);

if (verb === "build") {
  await prepare();
  await build(site);
} else if (verb === "preview") {
  await serve({ root: site, port });
} else if (verb === "dev") {
  await prepare();
  watch(new URL("../docs/", import.meta.url), { recursive: true }, () => {
    try {
      prepareDocs();
    } catch (error) {
      console.error(String(error));
    }
  });
  const server = await createServer(site, { port });
  await server.listen();
  server.printUrls();
} else {
  console.error("node site/main.ts build | preview | dev [--port 5173]");
  process.exitCode = 2;
}
