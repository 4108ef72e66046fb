/** The documentation site, as a reader has it: built, served, and looked at in Chromium. */
import { execFile } from "node:child_process";
import { createReadStream, existsSync, readFileSync, readdirSync } from "node:fs";
import { type Server, createServer } from "node:http";
import type { AddressInfo } from "node:net";
import { extname, join, relative } from "node:path";
import { promisify } from "node:util";
import type { Browser, BrowserContextOptions, Page } from "playwright-core";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { faintTexts, noChromium, openChromium } from "./harness/chromium.ts";
import { root } from "./harness/command.ts";

const dist = join(root, "site/.vitepress/dist");
const types: Record<string, string> = {
  ".html": "text/html; charset=utf-8",
  ".js": "text/javascript",
  ".css": "text/css",
  ".svg": "image/svg+xml",
};

let server: Server;
let home = "";
beforeAll(async () => {
  await promisify(execFile)(
    process.execPath,
    ["--conditions=holdfast-source", join(root, "site/main.ts"), "build"],
    { cwd: root, env: { ...process.env, NODE_ENV: "production" }, maxBuffer: 1 << 26 },
  );
  server = createServer(({ url = "/" }, response) => {
    const { pathname } = new URL(url, "http://site");
    const file = join(dist, pathname.endsWith("/") ? `${pathname}index.html` : pathname);
    if (!existsSync(file)) return void response.writeHead(404).end();
    response.setHeader("content-type", types[extname(file)] ?? "application/octet-stream");
    createReadStream(file).pipe(response);
  });
  await new Promise<void>((resolve) => void server.listen(0, "127.0.0.1", resolve));
  home = `http://127.0.0.1:${(server.address() as AddressInfo).port}`;
}, 600_000);

afterAll(() => {
  server?.close();
});

/** Every page that was built, by its path, with what it links to and what can be linked to. */
function builtPages() {
  const files = readdirSync(dist, { recursive: true, withFileTypes: true })
    .filter((entry) => entry.isFile() && entry.name.endsWith(".html"))
    .map((entry) => join(entry.parentPath, entry.name));
  return new Map(
    files.map((file) => {
      const html = readFileSync(file, "utf8");
      return [
        `/${relative(dist, file)}`,
        {
          links: [...html.matchAll(/<a\b[^>]*?\shref="([^"]*)"/g)].map(([, href = ""]) =>
            href.replaceAll("&amp;", "&"),
          ),
          ids: new Set([...html.matchAll(/\sid="([^"]+)"/g)].map(([, id]) => id)),
        },
      ];
    }),
  );
}

test("every link leads to a page, and to a place on it", () => {
  const pages = builtPages();
  const dead: string[] = [];
  let followed = 0;
  for (const [path, { links }] of pages) {
    if (path === "/404.html") continue;
    for (const link of new Set(links)) {
      const target = new URL(link, `http://site${path}`);
      if (target.host !== "site") continue;
      followed++;
      const place = decodeURIComponent(target.pathname);
      const found =
        [place, `${place}.html`, `${place}index.html`].map((each) => pages.get(each)).find(Boolean) ??
        (existsSync(join(dist, place)) && extname(place) !== "" ? { ids: undefined } : undefined);
      const anchor = decodeURIComponent(target.hash.slice(1));
      if (found === undefined) dead.push(`${path}: ${link}`);
      else if (anchor !== "" && found.ids && !found.ids.has(anchor)) dead.push(`${path}: ${link}`);
    }
  }
  expect(dead).toEqual([]);
  expect(followed).toBeGreaterThan(1000);
});

test("there is a page for each guide, client, engine, error code and verb", () => {
  const pages = builtPages();
  const missing = (paths: string[]) => paths.filter((path) => !pages.has(path));
  const docs = readdirSync(join(root, "docs"), { recursive: true, encoding: "utf8" });
  expect(
    missing(docs.filter((file) => file.endsWith(".md")).map((file) => `/${file.slice(0, -3)}.html`)),
  ).toEqual([]);
  const codes = [...readFileSync(join(root, "docs/errors.md"), "utf8").matchAll(/^\| `(HF_[A-Z_]+)`/gm)];
  expect(codes.length).toBeGreaterThan(40);
  expect(missing(codes.map(([, code]) => `/errors/${code}.html`))).toEqual([]);
  const verbs = readdirSync(join(root, "packages/cli/src/commands")).map((file) => file.replace(".ts", ""));
  expect(missing(verbs.map((verb) => `/commands/${verb}.html`))).toEqual([]);
});

describe("in Chromium", () => {
  let why: string | undefined;
  let browser: Browser | undefined;
  beforeAll(async () => {
    why = await noChromium();
    if (why === undefined) browser = await openChromium();
  }, 600_000);
  afterAll(() => browser?.close());

  /** What the pages of a reader ask for; nobody else's host is answered. */
  const asked: string[] = [];

  async function reader(options: BrowserContextOptions = {}): Promise<Page> {
    if (browser === undefined) throw new Error("There is no browser");
    const context = await browser.newContext(options);
    context.setDefaultTimeout(60_000);
    await context.route("**/*", (route) => {
      const url = route.request().url();
      asked.push(url);
      return url.startsWith(home) || url.startsWith("data:") ? route.continue() : route.abort();
    });
    return context.newPage();
  }

  /** As it is once scripts have run. */
  async function open(page: Page, path: string): Promise<void> {
    await page.goto(`${home}${path}`, { waitUntil: "networkidle" });
  }

  test("search finds a page, offline", async ({ skip }) => {
    skip(why !== undefined, why);
    const page = await reader();
    await open(page, "/");
    await page.keyboard.press("Control+k");
    await page.locator("#localsearch-input").fill("advisory");
    const results = page.locator(".VPLocalSearchBox .result");
    await results.first().waitFor();
    expect((await results.allInnerTexts()).join("\n")).toMatch(/advisory/i);
    await results.first().click();
    await page.waitForURL((url) => url.pathname !== "/");
    await page
      .locator(".vp-doc")
      .getByText(/advisory/i)
      .first()
      .waitFor();
    await page.context().close();
  });

  test("the tab of a client is open on the next page too", async ({ skip }) => {
    skip(why !== undefined, why);
    const page = await reader();
    await open(page, "/quick-start.html");
    const shown = () => page.locator(".vp-code-group .blocks > .active").first().innerText();
    expect(await shown()).toContain("holdfast/prisma");
    await page.locator(".vp-code-group label", { hasText: "Kysely" }).first().click();
    expect(await shown()).toContain("holdfast/kysely");
    expect(await shown()).not.toContain("holdfast/prisma");
    // By a link in the page, and by its address.
    await page.locator(".VPSidebar a", { hasText: "Queues" }).first().click();
    await page.waitForURL("**/queue*");
    await page.locator(".vp-code-group .blocks > .active", { hasText: "holdfast/kysely" }).waitFor();
    await open(page, "/stock.html");
    await page.locator(".vp-code-group .blocks > .active", { hasText: "holdfast/kysely" }).waitFor();
    await page.context().close();
  });

  test("a schedule is stepped through", async ({ skip }) => {
    skip(why !== undefined, why);
    const page = await reader();
    await open(page, "/quota.html");
    const schedule = page.locator(".schedule");
    const shown = () => schedule.locator(".turn:not(.heads):not(.later)").count();
    const all = await shown();
    expect(all).toBeGreaterThan(5);
    expect(await schedule.locator(".verdict").innerText()).toContain("11 images, and the limit is 10");
    await schedule.getByRole("button", { name: "Step through" }).click();
    expect(await shown()).toBe(1);
    expect(await schedule.locator(".verdict").innerText()).not.toContain("11 images");
    await schedule.getByRole("button", { name: "Next" }).click();
    await schedule.getByRole("button", { name: "Next" }).click();
    expect(await shown()).toBe(3);
    expect(await schedule.locator(".turn.now").innerText()).toContain("BEGIN");
    await schedule.getByRole("button", { name: "Back" }).click();
    expect(await shown()).toBe(2);
    await schedule.focus();
    for (let i = 2; i < all; i++) await page.keyboard.press("ArrowRight");
    expect(await shown()).toBe(all);
    expect(await schedule.locator(".verdict").innerText()).toContain("11 images, and the limit is 10");
    await page.context().close();
  });

  test("three questions are answered", async ({ skip }) => {
    skip(why !== undefined, why);
    const page = await reader();
    await open(page, "/choose.html");
    const chooser = page.locator(".chooser");
    const answer = () => chooser.locator(".answer").innerText();
    expect(await answer()).toContain("quota(hf");
    await chooser.locator("select[name=what]").selectOption("rows");
    await chooser.locator("select[name=database]").selectOption("mysql");
    expect(await answer()).toContain("tx.rows(");
    expect(await answer()).toContain("holdfast/mysql2");
    await chooser.getByRole("link", { name: "More about it" }).click();
    await page.waitForURL("**/rows*");
    await page.context().close();
  });

  const looked = [
    "/",
    "/quick-start.html",
    "/quota.html",
    "/rows.html",
    "/choose.html",
    "/capabilities.html",
    "/errors.html",
    "/errors/HF_OUTCOME_UNKNOWN.html",
    "/commands/queue.html",
    "/adapters/prisma.html",
    "/api/holdfast.html",
    "/examples/shop.html",
  ];

  test.for(["light", "dark"] as const)(
    "text can be read, and no page is wider than a telephone: %s",
    { timeout: 300_000 },
    async (colorScheme, { skip }) => {
      skip(why !== undefined, why);
      const page = await reader({ colorScheme });
      const wrong: string[] = [];
      for (const path of looked) {
        await page.setViewportSize({ width: 1280, height: 900 });
        await page.goto(`${home}${path}`);
        for (const text of await page.evaluate<string[]>(faintTexts)) wrong.push(`${path}: ${text}`);
        await page.setViewportSize({ width: 360, height: 740 });
        const width = await page.evaluate<number>("document.documentElement.scrollWidth");
        if (width > 360) wrong.push(`${path}: ${width} wide`);
      }
      expect(wrong).toEqual([]);
      await page.context().close();
    },
  );

  test("nobody else is asked for anything", async ({ skip }) => {
    skip(why !== undefined, why);
    expect(asked.length).toBeGreaterThan(50);
    expect(asked.filter((url) => !url.startsWith(home) && !url.startsWith("data:"))).toEqual([]);
  });
});
