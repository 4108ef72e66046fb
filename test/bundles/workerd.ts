import { exact } from "./exact.ts";

export default {
  async fetch(_: Request, env: { readonly DATABASE_URL: string }): Promise<Response> {
    try {
      return Response.json(await exact(env.DATABASE_URL));
    } catch (error) {
      return new Response(String((error as Error).stack), { status: 500 });
    }
  },
};
