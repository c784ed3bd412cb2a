#!/usr/bin/env node
// A replacement scheduler for Fairlead in JavaScript: least work first, work that is cached elsewhere weighed in.
//
// node main.js --listen 127.0.0.1:9101
import { existsSync, unlinkSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";

import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

const here = dirname(fileURLToPath(import.meta.url));
const { values } = parseArgs({
  options: {
    listen: { type: "string", default: "127.0.0.1:9101" },
    proto: { type: "string", default: join(here, "scheduler.proto") },
  },
});

const definition = loader.loadSync(values.proto, {
  enums: String,
  longs: String, // ids and numbers have 64 bits
  keepCase: false,
});
const { Scheduler } = grpc.loadPackageDefinition(definition).fairlead.scheduler.v1;

// What one gateway has told about its endpoints.
class Pool {
  endpoints = new Map(); // slot → endpoint
  queuedTokens = new Map(); // slot → prompt tokens still to be computed
  charged = []; // own picks that these figures do not include yet
  failing = new Set(); // ids of endpoints whose last answer was an error

  learn(state) {
    if (state.full) {
      this.endpoints.clear();
      this.queuedTokens.clear();
    }
    for (const slot of state.gone ?? []) {
      this.endpoints.delete(slot);
      this.queuedTokens.delete(slot);
    }
    for (const endpoint of state.endpoints ?? []) this.endpoints.set(endpoint.slot ?? 0, endpoint);
    const load = state.load;
    if (load?.queuedTokens?.length) {
      load.slots.forEach((slot, i) => this.queuedTokens.set(slot, load.queuedTokens[i]));
    }
    const settled = BigInt(state.settled ?? 0);
    this.charged = this.charged.filter((one) => one.batch > settled);
  }

  hear(outcomes) {
    for (const { endpoint, status } of outcomes) {
      if (status >= 500) this.failing.add(endpoint);
      else this.failing.delete(endpoint);
    }
  }

  pick(batch, request) {
    const hits = new Map();
    (request.hitSlots ?? []).forEach((slot, i) => hits.set(slot, request.hitShares[i]));
    const slots = request.candidates ? (request.candidates.slots ?? []) : [...this.endpoints.keys()];
    const prompt = request.promptTokens ?? 0;
    let best = null;
    for (const slot of slots) {
      const endpoint = this.endpoints.get(slot);
      if (!endpoint) continue;
      const own = prompt * (1 - (hits.get(slot) ?? 0));
      let tokens = (this.queuedTokens.get(slot) ?? 0) + own;
      for (const one of this.charged) if (one.slot === slot) tokens += one.tokens;
      if (this.failing.has(endpoint.id)) tokens += 10000;
      if (best === null || tokens < best.tokens) best = { slot, endpoint, tokens, own };
    }
    if (best === null) return { request: request.id, outcome: "OUTCOME_PASSED" };
    this.charged.push({ batch: BigInt(batch), slot: best.slot, tokens: best.own });
    return { request: request.id, outcome: "OUTCOME_PICKED", endpoint: best.endpoint.id, score: -best.tokens };
  }
}

function schedule(call) {
  const pool = new Pool();
  let greeted = false;
  call.on("data", (ask) => {
    const wrong = greeted === Boolean(ask.hello) || (!greeted && !(ask.hello.version >= 1));
    if (wrong) {
      call.emit("error", { code: grpc.status.INVALID_ARGUMENT, details: "one hello with a version, at the beginning" });
      return;
    }
    if (!greeted) {
      greeted = true;
      call.write({ welcome: { version: 1, scheduler: "scheduler-node", policy: "least-work", wantsOutcomes: true } });
    }
    if (ask.state) pool.learn(ask.state);
    if (ask.ended) pool.hear(ask.ended);
    if (ask.batch) {
      const number = ask.batch.number ?? 0;
      const picks = (ask.batch.requests ?? []).map((request) => pool.pick(number, request));
      call.write({ picks: { batch: number, picks } });
    }
  });
  call.on("error", () => {});
  call.on("end", () => call.end());
}

const server = new grpc.Server();
server.addService(Scheduler.service, { schedule });
if (values.listen.startsWith("unix:") && existsSync(values.listen.slice(5))) unlinkSync(values.listen.slice(5));
server.bindAsync(values.listen, grpc.ServerCredentials.createInsecure(), (error, port) => {
  if (error) {
    console.error(error.message);
    process.exit(1);
  }
  console.log(`listening on ${values.listen.startsWith("unix:") ? values.listen : `port ${port}`}`);
});
