/** Limits in front of handlers: each framework is started for real, and asked over HTTP. */
import { subscribe, unsubscribe } from "node:diagnostics_channel";
import { type IncomingMessage, type RequestListener, type Server, createServer } from "node:http";
import { type AddressInfo, createServer as createTcpServer } from "node:net";
import { Controller, Get, HttpException, Module, UseGuards } from "@nestjs/common";
import { NestFactory } from "@nestjs/core";
import express, { type Request as ExpressRequest } from "express";
import { rateLimit } from "express-rate-limit";
import fastify, { type FastifyRequest } from "fastify";
import { Hono, type Context as HonoContext } from "hono";
import { type Events, type Holdfast, UsageError, holdfast } from "holdfast";
import { type LimitOptions, limit as expressLimit } from "holdfast/express";
import { HoldfastStore } from "holdfast/express-rate-limit";
import { limit as fastifyLimit } from "holdfast/fastify";
import { withLimit } from "holdfast/fetch";
import { limit as honoLimit } from "holdfast/hono";
import { quotaGuard } from "holdfast/nestjs";
import { fromPg } from "holdfast/pg";
import { type Quota, type QuotaSet, quota } from "holdfast/quota";
import { Pool, type PoolClient } from "pg";
import { afterAll, afterEach, beforeAll, describe, expect, test } from "vitest";
import { type Backend, backends } from "./backends.ts";
import { type TestDatabase, createDatabase } from "./harness/databases.ts";
import { missing, placeFor } from "./harness/places.ts";

let database: TestDatabase;
let pool: Pool;
let hf: Holdfast<PoolClient>;
/** Nobody listens there. */
let nowhere: Pool;
let away: Holdfast<PoolClient>;

beforeAll(async () => {
  database = await createDatabase("postgres");
  pool = new Pool({ connectionString: database.url, max: 4 });
  hf = holdfast(fromPg(pool));
  await hf.migrate();
  nowhere = new Pool({ host: "127.0.0.1", port: await closedPort(), max: 2 });
  away = holdfast(fromPg(nowhere));
});

const closers: (() => Promise<unknown>)[] = [];
afterEach(async () => {
  for (const close of closers.splice(0)) await close();
});
afterAll(async () => {
  await hf?.close();
  await pool?.end();
  await nowhere?.end();
  await database?.drop();
});

async function closedPort(): Promise<number> {
  const server = createTcpServer();
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  const { port } = server.address() as AddressInfo;
  await new Promise((resolve) => server.close(resolve));
  return port;
}

async function listen(listener: RequestListener): Promise<string> {
  const server: Server = createServer(listener);
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  closers.push(async () => {
    server.closeAllConnections();
    await new Promise((resolve) => server.close(resolve));
  });
  return `http://127.0.0.1:${(server.address() as AddressInfo).port}/`;
}

/** As servers of the Fetch API do it: what is thrown becomes 500. */
function listenFetch(handler: (request: Request) => Response | Promise<Response>): Promise<string> {
  const answer = async ({ method = "GET", url, headers }: IncomingMessage): Promise<Response> => {
    try {
      return await handler(
        new Request(new URL(url ?? "/", "http://localhost"), {
          method,
          headers: Object.entries(headers).map(([name, value]): [string, string] => [name, String(value)]),
        }),
      );
    } catch {
      return new Response("Internal Server Error", { status: 500 });
    }
  };
  return listen((req, res) => {
    void answer(req).then(async (response) => {
      res.writeHead(response.status, Object.fromEntries(response.headers));
      res.end(await response.text());
    });
  });
}

/** The same options for each framework, which differ in how a header is read. */
type Options = <R>(header: (request: R, name: string) => string | undefined) => LimitOptions<R>;
type Start = (of: Quota | QuotaSet, options: Options) => Promise<string>;

const byUser: Options = (header) => ({ subject: (request) => header(request, "x-user") as string });

const frameworks: Record<string, Start> = {
  express(of, options) {
    const app = express();
    // Its error handler would write to the console.
    app.set("env", "test");
    app.use(
      expressLimit(
        of,
        options((req: ExpressRequest, name) => req.get(name)),
      ),
    );
    app.get("/", (_, res) => {
      res.send("done");
    });
    return listen(app as RequestListener);
  },

  async fastify(of, options) {
    const app = fastify();
    const header = ({ headers }: FastifyRequest, name: string) => headers[name] as string | undefined;
    app.addHook("preHandler", fastifyLimit(of, options(header)));
    app.get("/", async () => "done");
    closers.push(() => app.close());
    return `${await app.listen({ host: "127.0.0.1", port: 0 })}/`;
  },

  hono(of, options) {
    const app = new Hono();
    app.use(
      honoLimit(
        of,
        options((c: HonoContext, name) => c.req.header(name)),
      ),
    );
    app.get("/", () => new Response("done"));
    app.onError((_, c) => c.text("Internal Server Error", 500));
    return listenFetch((request) => app.fetch(request));
  },

  async nestjs(of, options) {
    class Uploads {
      upload(): string {
        return "done";
      }
    }
    const App = class {
      readonly name = "app";
    };
    // As decorators do it, of the kind that this repository's sources cannot have.
    const method = Object.getOwnPropertyDescriptor(Uploads.prototype, "upload") as PropertyDescriptor;
    Get()(Uploads.prototype, "upload", method);
    const header = ({ headers }: ExpressRequest, name: string) => headers[name] as string | undefined;
    UseGuards(quotaGuard(of, { HttpException, ...options(header) }))(Uploads.prototype, "upload", method);
    Controller()(Uploads);
    Module({ controllers: [Uploads] })(App);
    const app = await NestFactory.create(App, { logger: false });
    await app.listen(0, "127.0.0.1");
    closers.push(() => app.close());
    return `${await app.getUrl()}/`;
  },

  fetch(of, options) {
    const header = ({ headers }: Request, name: string) => headers.get(name) ?? undefined;
    return listenFetch(withLimit(of, options(header), async () => new Response("done")));
  },
};

let made = 0;
/** A window that does not end while a test runs. */
const perYear = (limit: number, name = `q${++made}`) => quota(hf, { name, limit, per: "year" });
const year = 31_556_952;

function get(url: string, user = "ada", headers: Record<string, string> = {}): Promise<Response> {
  return fetch(url, { headers: { ...(user !== "" && { "x-user": user }), ...headers } });
}

interface Shown {
  status: number;
  policy: string | null;
  limit: string | null;
  retryAfter: number | undefined;
  type: string | null;
  text: string;
}

async function shown(response: Response): Promise<Shown> {
  const { status, headers } = response;
  const after = headers.get("retry-after");
  return {
    status,
    policy: headers.get("ratelimit-policy"),
    // How long it is until the new year differs from day to day.
    limit: headers.get("ratelimit")?.replaceAll(/;t=\d+/g, ";t=N") ?? null,
    retryAfter: after === null ? undefined : Number(after),
    type: headers.get("content-type")?.split(";")[0] ?? null,
    text: await response.text(),
  };
}

async function failures(run: () => Promise<void>): Promise<Events["holdfast:quota:failed"][]> {
  const seen: Events["holdfast:quota:failed"][] = [];
  const listener = (event: unknown) => seen.push(event as Events["holdfast:quota:failed"]);
  subscribe("holdfast:quota:failed", listener);
  try {
    await run();
  } finally {
    unsubscribe("holdfast:quota:failed", listener);
  }
  return seen;
}

describe.each(Object.entries(frameworks))("%s", (_, start) => {
  test("counts down, then refuses, and each subject has its own", async () => {
    const uploads = perYear(3);
    const { name } = uploads;
    const url = await start(uploads, byUser);
    for (const left of [2, 1, 0])
      expect(await shown(await get(url))).toMatchObject({
        status: 200,
        policy: `"${name}";q=3;w=${year}`,
        limit: `"${name}";r=${left};t=N`,
        retryAfter: undefined,
        text: "done",
      });
    const response = await get(url);
    const t = /;t=(\d+)/.exec(response.headers.get("ratelimit") ?? "")?.[1];
    const refused = await shown(response);
    expect(refused).toMatchObject({
      status: 429,
      policy: `"${name}";q=3;w=${year}`,
      limit: `"${name}";r=0;t=N`,
      retryAfter: Number(t),
      type: "application/problem+json",
    });
    expect(refused.retryAfter).toBeGreaterThan(0);
    expect(JSON.parse(refused.text)).toEqual({
      type: "https://iana.org/assignments/http-problem-types#quota-exceeded",
      title: "Request cannot be satisfied as assigned quota has been exceeded",
      status: 429,
      detail: `Quota ${name}: 1 asked for, 0 left of 3. Try again in ${t} s.`,
      "violated-policies": [name],
    });
    expect(refused.text).not.toContain("ada");
    expect(await shown(await get(url, "bob"))).toMatchObject({ status: 200 });
  });

  test("20 at once, of 5: exactly 5", async () => {
    const url = await start(perYear(5), byUser);
    const responses = await Promise.all(Array.from({ length: 20 }, () => get(url)));
    const statuses = responses.map(({ status }) => status).toSorted((a, b) => a - b);
    expect(statuses).toEqual([...Array<number>(5).fill(200), ...Array<number>(15).fill(429)]);
    await Promise.all(responses.map((response) => response.text()));
  });

  test("without a subject it is an error, and not a limit that all share", async () => {
    const uploads = perYear(3);
    const url = await start(uploads, byUser);
    expect((await get(url, "")).status).toBe(500);
    expect(await uploads.peek("undefined")).toMatchObject({ used: 0 });
    expect((await get(url)).status).toBe(200);
  });

  test("the same id counts once; for another amount it is refused", async () => {
    const uploads = perYear(10);
    const url = await start(uploads, (header) => ({
      subject: (request) => header(request, "x-user") as string,
      id: (request) => header(request, "idempotency-key"),
      amount: (request) => Number(header(request, "x-amount") ?? 2),
      skip: (request) => header(request, "x-free") === "yes",
    }));
    expect((await shown(await get(url, "ada", { "idempotency-key": "a" }))).limit).toContain("r=8");
    // The answer of then says nothing about now.
    expect(await shown(await get(url, "ada", { "idempotency-key": "a" }))).toMatchObject({
      status: 200,
      policy: `"${uploads.name}";q=10;w=${year}`,
      limit: null,
    });
    expect(await uploads.peek("ada")).toMatchObject({ used: 2 });
    expect(await shown(await get(url, "ada", { "idempotency-key": "a", "x-amount": "3" }))).toMatchObject({
      status: 422,
      type: "application/problem+json",
    });
    expect(await shown(await get(url, "", { "x-free": "yes" }))).toMatchObject({ status: 200, policy: null });
    expect(await uploads.peek("ada")).toMatchObject({ used: 2 });
  });

  test("of several limits the one that refused is named", async () => {
    const [org, user] = [perYear(10), perYear(1)];
    const url = await start(quota.all([org, user]), (header) => ({
      subject: (request) => ["acme", header(request, "x-user") as string],
      onDenied: ({ quota: name }) => ({ upgrade: `/plans?for=${name}` }),
    }));
    expect(await shown(await get(url))).toMatchObject({
      status: 200,
      policy: `"${org.name}";q=10;w=${year}, "${user.name}";q=1;w=${year}`,
      limit: `"${org.name}";r=9;t=N, "${user.name}";r=0;t=N`,
    });
    const refused = await shown(await get(url));
    expect(refused).toMatchObject({
      status: 429,
      limit: `"${org.name}";r=9;t=N, "${user.name}";r=0;t=N`,
    });
    expect(JSON.parse(refused.text)).toMatchObject({
      "violated-policies": [user.name],
      upgrade: `/plans?for=${user.name}`,
    });
    expect((await get(url, "bob")).status).toBe(200);
  });

  test("the database is away: 503, or open and told of", async () => {
    const uploads = quota(away, { name: "uploads", limit: 3, per: "year" });
    const errors: unknown[] = [];
    const told = await failures(async () => {
      const closed = await start(uploads, (header) => ({
        ...byUser(header),
        fail: "closed",
        onError: (error) => void errors.push(error),
      }));
      const answer = await shown(await get(closed));
      expect(answer).toMatchObject({
        status: 503,
        policy: null,
        limit: null,
        retryAfter: 5,
        type: "application/problem+json",
      });
      expect(JSON.parse(answer.text)).toMatchObject({ status: 503, title: "Service Unavailable" });
      expect(answer.text).not.toContain("ECONNREFUSED");
      expect(errors).toHaveLength(1);

      const open = await start(uploads, (header) => ({
        ...byUser(header),
        fail: "open",
        onError: (error) => void errors.push(error),
      }));
      expect(await shown(await get(open))).toMatchObject({
        status: 200,
        policy: null,
        limit: null,
        text: "done",
      });
      expect(errors).toHaveLength(2);
      // A mistake of the program is none of the database.
      expect((await get(open, "")).status).toBe(500);
    });
    expect(told).toEqual([
      { quotas: ["uploads"], failed: "closed", error: errors[0] },
      { quotas: ["uploads"], failed: "open", error: errors[1] },
    ]);
  });
});

const elsewhere = ["mysql2 on MySQL", "mysql2 on MariaDB", "better-sqlite3"].map(
  (name) => backends.find((each) => each.name === name) as Backend,
);

describe.each(elsewhere)("on $name", (backend) => {
  test("20 at once, of 5: exactly 5, whichever framework; and the same id counts once", async ({ skip }) => {
    const lacking = missing(backend);
    skip(lacking !== undefined, lacking);
    const place = await placeFor(backend);
    const site = await backend.open(place.url);
    const there = holdfast(site.database);
    closers.push(async () => {
      await there.close();
      await site.close();
      await place.drop();
    });
    await there.migrate();
    for (const [name, start] of Object.entries(frameworks)) {
      const uploads = quota(there, { name, limit: 5, per: "year" });
      const url = await start(uploads, (header) => ({
        subject: (request) => header(request, "x-user") as string,
        id: (request) => header(request, "idempotency-key"),
      }));
      const answers = await Promise.all(Array.from({ length: 20 }, async () => shown(await get(url, "ada"))));
      const statuses = answers.map(({ status }) => status).toSorted((a, b) => a - b);
      expect([name, statuses]).toEqual([
        name,
        [...Array<number>(5).fill(200), ...Array<number>(15).fill(429)],
      ]);
      expect(answers.find(({ status }) => status === 429)).toMatchObject({
        policy: `"${name}";q=5;w=${year}`,
        limit: `"${name}";r=0;t=N`,
      });
      const again = await Promise.all(
        [1, 2, 3].map(async () => shown(await get(url, "bob", { "idempotency-key": "a" }))),
      );
      expect(again.map(({ status }) => status)).toEqual([200, 200, 200]);
      expect(await uploads.peek("bob")).toMatchObject({ used: 1 });
    }
  });
});

describe("fields", () => {
  const start = frameworks["fetch"] as Start;

  test("names are quoted, and those that cannot be are refused", async () => {
    const odd = perYear(3, `a "b" \\c`);
    expect((await shown(await get(await start(odd, byUser)))).policy).toBe(`"a \\"b\\" \\\\c";q=3;w=${year}`);
    expect(() => start(perYear(3, "Größe"), byUser)).toThrow(UsageError);
    expect(() => start(perYear(3, "a\nb"), byUser)).toThrow(UsageError);
  });

  test("without a window there is no time, and time alone does not help", async () => {
    const seats = quota(hf, { name: "seats", limit: 1 });
    const url = await start(seats, byUser);
    expect(await shown(await get(url))).toMatchObject({ policy: `"seats";q=1`, limit: `"seats";r=0` });
    const response = await get(url);
    expect(response.status).toBe(429);
    expect(response.headers.has("retry-after")).toBe(false);
    expect(await response.json()).toMatchObject({ detail: "Quota seats: 1 asked for, 0 left of 1." });
  });

  test("a window that slides tells when there is more only to who was refused", async () => {
    const burst = quota(hf, { name: "burst", limit: 1, per: "hour", window: "refill" });
    const url = await start(burst, byUser);
    expect(await shown(await get(url))).toMatchObject({
      policy: `"burst";q=1;w=3600`,
      limit: `"burst";r=0`,
    });
    const refused = await shown(await get(url));
    expect(refused).toMatchObject({ status: 429, limit: `"burst";r=0;t=N` });
    expect(refused.retryAfter).toBeGreaterThan(3000);
  });

  test("who comes back after Retry-After is not early", async () => {
    const uploads = perYear(1);
    const url = await start(uploads, byUser);
    await get(url);
    const { at, resetAt } = await uploads.peek("ada");
    const { retryAfter = 0 } = await shown(await get(url));
    const after = await uploads.peek("ada");
    const reset = resetAt?.getTime() ?? 0;
    expect(after.at.getTime() + retryAfter * 1000).toBeGreaterThanOrEqual(reset);
    expect(at.getTime() + (retryAfter - 1) * 1000).toBeLessThan(reset);
  });

  test("no limit has no fields", async () => {
    expect(await shown(await get(await start(perYear(Infinity), byUser)))).toMatchObject({
      status: 200,
      policy: null,
      limit: null,
    });
  });

  test("those of several limits of one response add up", async () => {
    const [all, few] = [perYear(5), perYear(2)];
    const both = `"${all.name}";q=5;w=${year}, "${few.name}";q=2;w=${year}`;
    const app = express();
    app.use(expressLimit(all, { subject: () => "everybody" }));
    app.use(expressLimit(few, { subject: (req: ExpressRequest) => req.get("x-user") as string }));
    app.get("/", (_, res) => {
      res.send("done");
    });
    expect(await shown(await get(await listen(app as RequestListener)))).toMatchObject({
      policy: both,
      limit: `"${all.name}";r=4;t=N, "${few.name}";r=1;t=N`,
    });

    const inner = withLimit(few, { subject: () => "ada2" }, () => Response.redirect("http://localhost/x"));
    const outer = withLimit(all, { subject: () => "ada2" }, inner);
    const response = await outer(new Request("http://localhost/"));
    expect(response.status).toBe(302);
    expect(response.headers.get("location")).toBe("http://localhost/x");
    expect(response.headers.get("ratelimit-policy")).toBe(both.split(", ").toReversed().join(", "));
  });
});

describe("options", () => {
  const subject = () => "ada";

  test("what cannot be right is refused at once", () => {
    const uploads = perYear(1);
    const handler = () => new Response("done");
    const wrong = (options: unknown, of: unknown = uploads) =>
      expect(() => withLimit(of as Quota, options as LimitOptions<Request>, handler)).toThrow(UsageError);
    wrong({ subject, fail: "open" });
    wrong({ subject, fail: "ajar", onError: () => {} });
    wrong({});
    wrong({ subject, subjects: subject });
    wrong({ subject, timeout: 0 });
    wrong({ subject }, {});
    // @ts-expect-error -- nobody would see it.
    wrong({ subject, fail: "open" } satisfies LimitOptions<Request>);
    expect(() => quotaGuard(uploads, { subject } as never)).toThrow("HttpException");
  });

  test.each([undefined, null, "", Number.NaN, ["ada"]])("the subject cannot be %j", async (odd) => {
    let asked = false;
    const handler = withLimit(
      perYear(1),
      { subject: () => odd as string, fail: "open", onError: () => {} },
      () => {
        asked = true;
        return new Response("done");
      },
    );
    await expect(handler(new Request("http://localhost/"))).rejects.toThrow(UsageError);
    expect(asked).toBe(false);
  });

  test("a database that hangs is away as well", async () => {
    const sockets: { destroy(): void }[] = [];
    const silent = createTcpServer((socket) => void sockets.push(socket));
    await new Promise<void>((resolve) => silent.listen(0, "127.0.0.1", resolve));
    const hanging = new Pool({ host: "127.0.0.1", port: (silent.address() as AddressInfo).port, max: 1 });
    try {
      const uploads = quota(holdfast(fromPg(hanging)), { name: "uploads", limit: 3 });
      let error: unknown;
      const handler = withLimit(
        uploads,
        { subject, timeout: 200, onError: (e) => void (error = e) },
        () => new Response("done"),
      );
      expect((await handler(new Request("http://localhost/"))).status).toBe(503);
      expect(error).toMatchObject({ name: "TimeoutError" });
    } finally {
      await new Promise((resolve) => {
        silent.close(resolve);
        for (const socket of sockets) socket.destroy();
      });
      await hanging.end();
    }
  });

  test("without `onError` there is one warning, and 503 each time", async () => {
    const warnings: Error[] = [];
    const listener = (warning: Error) => warnings.push(warning);
    process.on("warning", listener);
    try {
      const uploads = quota(away, { name: "uploads", limit: 3 });
      const handler = withLimit(uploads, { subject }, () => new Response("done"));
      for (let i = 0; i < 2; i++) expect((await handler(new Request("http://localhost/"))).status).toBe(503);
      expect(warnings.map(({ name }) => name)).toEqual(["QuotaUnavailable"]);
    } finally {
      process.off("warning", listener);
    }
  });

  test("one route has a limit of its own", async () => {
    const uploads = perYear(9);
    const app = express();
    app.get(
      "/",
      expressLimit(uploads, { subject: (req: ExpressRequest) => req.get("x-user") as string }),
      (_, res) => {
        res.send("done");
      },
    );
    expect((await get(await listen(app as RequestListener))).status).toBe(200);

    interface Env {
      Variables: { user: string };
    }
    const hono = new Hono<Env>();
    hono.use(async (c, next) => {
      c.set("user", "ada");
      await next();
    });
    hono.get("/", honoLimit(uploads, { subject: (c: HonoContext<Env>) => c.get("user") }), (c) =>
      c.text("done"),
    );
    const response = await hono.request("/");
    expect([response.status, response.headers.get("ratelimit")]).toEqual([
      200,
      expect.stringContaining("r=7"),
    ]);

    const server = fastify();
    server.get(
      "/",
      {
        preHandler: fastifyLimit(uploads, {
          subject: (request: FastifyRequest) => request.headers["x-user"] as string,
        }),
      },
      async () => "done",
    );
    const injected = await server.inject({ url: "/", headers: { "x-user": "ada" } });
    expect([injected.statusCode, injected.headers["ratelimit"]]).toEqual([
      200,
      expect.stringContaining("r=6"),
    ]);
    await server.close();
  });
});

describe("express-rate-limit", () => {
  const windowMs = 28 * 86_400_000;

  function start(name: string, of: Holdfast<PoolClient>, more: { skipFailedRequests?: boolean } = {}) {
    const app = express();
    app.use(
      rateLimit({
        windowMs,
        limit: 5,
        standardHeaders: "draft-8",
        legacyHeaders: false,
        keyGenerator: (req) => req.get("x-user") as string,
        store: new HoldfastStore(of, { name }),
        ...more,
      }),
    );
    app.get("/", (req, res) => {
      res.status(req.get("x-fail") === "yes" ? 400 : 200).send("done");
    });
    return listen(app as RequestListener);
  }

  test("one limit for two applications", async () => {
    const other = new Pool({ connectionString: database.url, max: 2 });
    try {
      const urls = [await start("shared", hf), await start("shared", holdfast(fromPg(other)))];
      const responses = await Promise.all(Array.from({ length: 20 }, (_, i) => get(urls[i % 2] as string)));
      expect(responses.filter(({ status }) => status === 200)).toHaveLength(5);
      expect(responses.filter(({ status }) => status === 429)).toHaveLength(15);
      expect((await get(urls[0] as string, "bob")).status).toBe(200);
      // Those that were refused count, too.
      const counted = quota(hf, { name: "shared", limit: Infinity, per: windowMs });
      expect(await counted.peek("ada")).toMatchObject({ used: 20 });
    } finally {
      await other.end();
    }
  });

  test("requests that are not to count are taken back", async () => {
    const url = await start("taken-back", hf, { skipFailedRequests: true });
    const counted = quota(hf, { name: "taken-back", limit: Infinity, per: windowMs });
    expect((await get(url)).status).toBe(200);
    await Promise.all(Array.from({ length: 3 }, () => get(url, "ada", { "x-fail": "yes" })));
    // They are taken back after the response.
    await expect.poll(async () => (await counted.peek("ada")).used, { timeout: 15_000 }).toBe(1);
    expect(await counted.reconcile("ada")).toMatchObject({ ok: true });
  });

  test("what a store can do", async () => {
    const store = new HoldfastStore(hf, { name: "store" });
    await expect(store.increment("a")).rejects.toThrow(UsageError);
    store.init({ windowMs, skipFailedRequests: true });
    expect(await store.get("a")).toBeUndefined();
    expect(await store.increment("a")).toMatchObject({ totalHits: 1, resetTime: expect.any(Date) });
    expect(await store.increment("a")).toMatchObject({ totalHits: 2 });
    await store.decrement("a");
    await store.decrement("nobody");
    expect(await store.get("a")).toMatchObject({ totalHits: 1 });
    await store.resetKey("a");
    await store.decrement("a");
    expect(await store.get("a")).toBeUndefined();
    expect(() => new HoldfastStore(hf, { name: "" })).toThrow(UsageError);
  });
});
